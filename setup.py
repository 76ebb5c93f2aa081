import os
import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
(VERSION,) = re.findall(r'^__version__ = "(.+)"$', (ROOT / "ms_gradaccum" / "__init__.py").read_text(), re.M)
# Where the sources are published, given when a release is built (CONTRIBUTING.md).
URL = os.environ.get("MS_GRADACCUM_URL", "").rstrip("/")


def description() -> str:
    """Return the README for an index, where no relative link leads anywhere.

    Links lead to the files of this version at the address. Without one, pictures and targets of links are left out.
    """
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    if URL:
        text = re.sub(r"(!\[[^]]*\]\()(?!\w+:)", rf"\1{URL}/raw/v{VERSION}/", text)
        return re.sub(r"((?<!!)\[[^]]*\]\()(?!\w+:)", rf"\1{URL}/blob/v{VERSION}/", text)
    text = re.sub(r"!\[[^]]*\]\((?!\w+:)[^)]*\)\n*", "", text)
    return re.sub(r"\[([^]]*)\]\((?!\w+:)[^)]*\)", r"\1", text)


pages = {"Documentation": "docs/README.md", "Changelog": "CHANGELOG.md", "Security": "SECURITY.md"}
urls = {name: f"{URL}/blob/v{VERSION}/{page}" for name, page in pages.items()}

setup(
    version=VERSION,
    long_description=description(),
    long_description_content_type="text/markdown",
    project_urls={"Source": URL, "Issues": f"{URL}/issues", **urls} if URL else {},
)
