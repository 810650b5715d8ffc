"""new: write a job file with comments, to start from."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from paragrad.errors import Refused, add_file_name

TEMPLATE = "job_template.py"


def write_job_file(path: Path) -> None:
    """Write a job file: a copy of `job_template.py`, with the name of the file.

    Args:
        path: The file, NAME.py.

    Raises:
        Refused: The file exists, or its name or its folder is wrong.
    """
    if path.suffix != ".py" or not path.stem.isidentifier():
        raise Refused(
            f"{path} is not the name of a Python module; give letters, digits and underscores with "
            ".py at the end, such as mine.py"
        )
    if not path.parent.is_dir():
        raise Refused(f"there is no folder {path.parent}; make it first")
    text = files(__package__).joinpath(TEMPLATE).read_text().replace("FILE.py", path.name)
    try:
        with add_file_name(path), path.open("x") as file:
            file.write(text.replace('name="template"', f'name="{path.stem}"'))
    except FileExistsError:
        raise Refused(f"{path} exists; give another name, or remove it first") from None
