"""Parts of bench/misroute: its load, the engines' events, the verdicts and the figures."""
