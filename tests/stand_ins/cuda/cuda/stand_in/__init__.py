"""What is behind the stand-in for CUDA's Python bindings: processes, memory, streams, counts.

Environment variables, read at the first call of a process:

- ``STAND_IN_CUDA``: folder that processes share. Device memory is in files there, so that handles of one process can be
  opened in another. Without it memory belongs to its process.
- ``STAND_IN_CUDA_DEVICES``: number of GPUs, 2 by default.
- ``STAND_IN_CUDA_MEMORY``: bytes that a GPU has for all processes together, 1 GiB by default.
- ``STAND_IN_CUDA_FRAMEWORKS``: Nerite takes frameworks built for processors for ones that compute on the GPUs. What
  they allocate themselves is then memory of the GPU, where the kind of a copy says so.
- ``STAND_IN_CUDA_DELAY_MS``: how long an operation on a stream takes, 0 by default.
- ``STAND_IN_CUDA_FAIL``: ``function:nth[:error]``, several separated by commas: the nth call of that function fails in
  each process, with cudaErrorUnknown unless another error is named.

``CUDA_VISIBLE_DEVICES`` has no effect: the tests set it, so that they use no GPU that the machine has.

As with CUDA, a process that was forked by one that used CUDA cannot use it: each call fails with
cudaErrorInitializationError. A process that was forked before is one as any other.
"""
