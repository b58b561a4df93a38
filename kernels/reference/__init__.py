"""The kernels in plain torch, for devices that the C kernels do not reach: correct before fast.

Called by the kernels' faces, which have checked shapes and types by then; what comes from tables (positions, slots,
block ids) is checked here, since a device would write elsewhere or stop. They take memory for a moment, as torch does.
"""
