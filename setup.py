from setuptools import Extension, setup

# Not a module but a library of functions. Without a C++ compiler the package works as well, but is slower on CPU.
KERNELS = Extension(
    "ms_gradaccum.backend._kernels",
    ["ms_gradaccum/backend/kernels.cc"],
    extra_compile_args=["-O3"],
    extra_link_args=["-s"],
    optional=True,
)

setup(ext_modules=[KERNELS])  # all else is in pyproject.toml
