"""Kernels of a CUDA device in bf16 and fp16: flashinfer for attention, norms and rotary positions, cuBLAS else."""
