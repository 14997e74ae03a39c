"""The Triton kernels. Imported only where a launch needs them: importing the package needs no Triton."""
