"""What is remembered: pure data structures over prefixes. Time is passed in, nothing is awaited."""
