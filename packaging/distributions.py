"""The packages that Shoal runs with, as they are installed: read from the environment's metadata.

`bundle` copies their files, and the list of parts (CycloneDX) of a release names them.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import uuid
from collections.abc import Iterator
from importlib.metadata import Distribution
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def runtime_distributions(*roots: str) -> list[Distribution]:
    """Return the installed distributions that Shoal, or `roots`, need here, with themselves, sorted by name.

    Test tools are left out. A root is a requirement as in pyproject.toml.
    """
    found: dict[tuple[str, str], Distribution] = {}
    queue: list[tuple[str, str]] = []
    for root in map(Requirement, roots or ("shoal",)):
        queue += [(canonicalize_name(root.name), extra) for extra in ("", *root.extras)]
    while queue:
        name, extra = queue.pop()
        if (name, extra) in found:
            continue
        distribution = importlib.metadata.distribution(name)
        found[name, extra] = distribution
        for line in distribution.requires or ():
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                wanted = canonicalize_name(requirement.name)
                queue += [(wanted, ""), *((wanted, name) for name in requirement.extras)]
    return [found[key] for key in sorted(found) if not key[1]]


def cyclonedx(version: str, distributions: list[Distribution]) -> dict[str, Any]:
    """Return the list of parts of a release as a CycloneDX 1.5 document."""
    parts = [_component(one) for one in distributions if canonicalize_name(one.name) != "shoal"]
    digest = hashlib.sha256(json.dumps([version, parts], sort_keys=True).encode()).hexdigest()
    shoal = _purl("shoal", version)
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.5.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        # The same parts get the same number, so that a release can be built again and compared.
        "serialNumber": f"urn:uuid:{uuid.UUID(digest[:32], version=4)}",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "bom-ref": shoal,
                "name": "shoal",
                "version": version,
                "purl": shoal,
                "licenses": [{"license": {"id": "MIT"}}],
            }
        },
        "components": parts,
        "dependencies": [{"ref": shoal, "dependsOn": [part["bom-ref"] for part in parts]}],
    }


def _component(distribution: Distribution) -> dict[str, Any]:
    purl = _purl(canonicalize_name(distribution.name), distribution.version)
    licences = list(_licences(distribution))
    return {
        "type": "library",
        "bom-ref": purl,
        "name": canonicalize_name(distribution.name),
        "version": distribution.version,
        "purl": purl,
        **({"licenses": licences} if licences else {}),
    }


def _purl(name: str, version: str) -> str:
    return f"pkg:pypi/{name}@{version.replace('+', '%2B')}"


def _licences(distribution: Distribution) -> Iterator[dict[str, Any]]:
    """The licence as the package states it: an SPDX expression, or else its own words."""
    metadata = distribution.metadata.json
    expression = metadata.get("license_expression")
    if expression:
        yield {"expression": expression}
        return
    names = [line.rpartition(" :: ")[2] for line in metadata.get("classifier", ()) if "License ::" in line]
    stated = str(metadata.get("license", "")).strip()
    if not names and stated and len(stated) <= 64 and "\n" not in stated:
        names = [stated]
    for name in names:
        yield {"license": {"name": name}}
