"""Build, sign and try a release: `make release`. Everything lands in dist/.

    python packaging/release.py [--key FILE] [--url URL] [--list FILE] [--no-bundle] [--no-try]

| file | what it is |
|---|---|
| `shoal-VERSION.tar.gz`, `.whl` | source archive and wheel, from the last commit |
| `shoal-VERSION-SYSTEM-MACHINE.tar.gz`, `.deb` | the bundle for this system (`bundle`) |
| `shoal-VERSION.cdx.json` | the list of parts (CycloneDX) |
| `SHA256SUMS`, `releases.json` | sums of all files, and the list for `shoal update --check` |
| `….minisig` | signatures of these two, made with the key in --key (`release_key`) |

The version is the one in pyproject.toml. Without --key nothing is signed, and the release is a rehearsal. The list goes
on from the one in --list, with --url as the place of this release.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import bundle
from bare_root import Failed, try_bundle
from distributions import cyclonedx, runtime_distributions
from release_key import KeyFileError, ReleaseKey

ROOT, DIST = bundle.ROOT, bundle.DIST
VALID_S = 366 * 86_400
SUMS, LIST = "SHA256SUMS", "releases.json"
# setuptools changes `sys.argv`, so it is read once.
BACKEND = """
import sys, setuptools.build_meta as backend
folder, *kinds = sys.argv[1:]
for kind in kinds:
    getattr(backend, f"build_{kind}")(folder)
"""


class ReleaseError(Exception):
    """The release cannot be built; the text says what to do."""


def main() -> int:
    """Build the release, and return the exit status."""
    arguments = parse()
    try:
        key = None if arguments.key is None else ReleaseKey.load(arguments.key)
        number = bundle.version()
        check_tree()
        shutil.rmtree(DIST, ignore_errors=True)
        DIST.mkdir()
        build_archives()
        write_json(DIST / f"shoal-{number}.cdx.json", cyclonedx(number, runtime_distributions()))
        if arguments.bundle:
            build_bundle(try_it=arguments.try_it)
        before = json.loads(arguments.list.read_text("utf-8")) if arguments.list else None
        write_json(DIST / LIST, next_list(before, number, arguments.url, time.time()))
        (DIST / SUMS).write_text(sums(DIST))
        if key is None:
            print("release: no --key was given, so nothing is signed: this is a rehearsal")
        else:
            sign(key)
    except (ReleaseError, KeyFileError, Failed, bundle.BundleError, OSError, subprocess.SubprocessError) as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    for path in sorted(DIST.iterdir()):
        print(f"release: {path.stat().st_size / 1e6:8.2f} MB  {path.name}")
    return 0


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="build, sign and try a release")
    parser.add_argument("--key", type=Path, help="the secret key file; without it nothing is signed")
    parser.add_argument("--url", default="", help="where this release can be had, for the list of releases")
    parser.add_argument("--list", type=Path, help="the list of releases so far")
    parser.add_argument("--no-bundle", dest="bundle", action="store_false", help="leave the bundle out")
    parser.add_argument("--no-try", dest="try_it", action="store_false", help="do not try the bundle in a bare root")
    return parser.parse_args()


def check_tree() -> None:
    """Refuse a checkout with changes that are not committed, which nobody could build again."""
    changed = git("status", "--porcelain", "--untracked-files=no")
    if changed:
        raise ReleaseError(f"commit these changes first:\n{changed}")


def git(*words: str) -> str:
    """Run git in this checkout, and return its output."""
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def build_archives() -> None:
    """Build source archive and wheel, from the files of the last commit alone; needs no network."""
    with tempfile.TemporaryDirectory() as folder:
        packed = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=packed, check=True)
        command = [sys.executable, "-P", "-c", BACKEND, str(DIST), "sdist", "wheel"]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    wanted = [f"shoal-{bundle.version()}{ending}" for ending in (".tar.gz", "-py3-none-any.whl")]
    missing = [name for name in wanted if not (DIST / name).exists()]
    if missing:
        raise ReleaseError(f"the build made no {' and no '.join(missing)}")


def build_bundle(*, try_it: bool) -> None:
    """Build the bundle and, where dpkg-deb is, the Debian package; try the bundle in a bare root."""
    folder = bundle.build()
    archive = bundle.pack(folder)
    bundle.pack_deb(folder)
    if try_it:
        with tempfile.TemporaryDirectory(prefix="shoal-root-") as root:
            print(f"release: tried in a bare root: {json.dumps(try_bundle(archive, Path(root)), ensure_ascii=False)}")


def next_list(before: dict[str, Any] | None, number: str, url: str, now: float) -> dict[str, Any]:
    """Return the list of releases with this one added, or replaced where it was there already."""
    older = [] if before is None else [one for one in before["releases"] if one["version"] != number]
    entry = {"version": number, "date": time.strftime("%Y-%m-%d", time.gmtime(now)), "url": url, "notes": ""}
    return {
        "format": 1,
        "serial": 1 if before is None else before["serial"] + 1,
        "issued_at": int(now),
        "expires_at": int(now) + VALID_S,
        "releases": [entry, *older],
    }


def sums(folder: Path) -> str:
    """Return the SHA-256 of every file, as `sha256sum --check` reads it."""
    lines = []
    for path in sorted(folder.iterdir()):
        if path.name != SUMS and path.suffix != ".minisig":
            with open(path, "rb") as file:
                lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.name}\n")
    return "".join(lines)


def sign(key: ReleaseKey) -> None:
    """Sign the sums and the list, and check both with the code and the key that users have."""
    sys.path.insert(0, str(ROOT))
    from app.system.releases import SIGNATURE_SUFFIX, check_signature, parse_list

    for name in (SUMS, LIST):
        data = (DIST / name).read_bytes()
        signature = key.sign(data, name)
        check_signature(data, signature)
        (DIST / f"{name}{SIGNATURE_SUFFIX}").write_bytes(signature)
    parse_list((DIST / LIST).read_bytes())


def write_json(path: Path, value: Any) -> None:
    """Write one JSON document, indented for people."""
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    sys.exit(main())
