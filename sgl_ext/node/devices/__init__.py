"""The devices of a node: which there are, and how many each engine takes."""
