"""What is decided: pure functions over plain data. The caller reads the clock and acts."""
