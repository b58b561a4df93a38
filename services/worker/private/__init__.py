"""Ranks that own their memory: weights in pieces, a pool for each layout, and what moves between ranks in a flip."""
