"""Parts of bench/warm_turn: its load, and the times of a turn's stages."""
