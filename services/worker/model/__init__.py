"""One module per architecture, named as formats.geometry names it; adding a model is adding its file.

Each module has `build(geometry, store, share, kind, max_batch_tokens) -> Stage`.
"""
