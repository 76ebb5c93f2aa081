from setuptools import Extension, setup

# Not a module but a library of one function. Without a C++ compiler the package works as well, but is slower on CPU.
KERNEL = Extension(
    "ms_gradaccum._add_in_place",
    ["ms_gradaccum/add_in_place.cc"],
    extra_compile_args=["-O3"],
    extra_link_args=["-s"],
    optional=True,
)

setup(ext_modules=[KERNEL])  # all else is in pyproject.toml
