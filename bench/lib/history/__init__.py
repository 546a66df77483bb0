"""Parts of bench/long_history: work by stage, memory by process, and how both grow."""
