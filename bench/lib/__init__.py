"""What benches share: loads, figures, and the programs that are measured beside ours."""
