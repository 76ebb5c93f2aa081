from setuptools import setup

setup()  # everything is in pyproject.toml
