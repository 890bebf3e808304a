"""Command line: python -m images build [NAME ...] [--push] | names."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

from images.build import IMAGES, build, compute_tag
from images.errors import ImageError
from images.run import Step, run


def main() -> int:
    """Parse and run; one clear line on failure."""
    parser = argparse.ArgumentParser(prog="images", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    build_parser = commands.add_parser("build", help="build the images whose content changed")
    build_parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(IMAGES)}; all when none is named"
    )
    build_parser.add_argument(
        "--push", action="store_true", help="push them to the registry of hack/devcluster"
    )
    build_parser.add_argument(
        "--force", action="store_true", help="build even when an image of this content exists"
    )
    names_parser = commands.add_parser("names", help="print the tag each image would have")
    names_parser.add_argument("-o", dest="output", choices=["text", "json"], default="text")
    arguments = parser.parse_args()
    try:
        return _build(arguments) if arguments.command == "build" else _names(arguments.output)
    except (ImageError, subprocess.CalledProcessError) as error:
        print(f"images: {error}", file=sys.stderr)
        return 1


def _build(arguments: argparse.Namespace) -> int:
    unknown = [name for name in arguments.names if name not in IMAGES]
    if unknown:
        raise ImageError(f"no image is called {', '.join(unknown)}: choose of {', '.join(IMAGES)}")
    for name in arguments.names or IMAGES:
        local = build(IMAGES[name], force=arguments.force)
        if arguments.push:
            with Step(f"push {name} to the cluster's registry"):
                run([sys.executable, "-m", "devcluster", "push", local], what=f"pushing {name}")
    return 0


def _names(output: str) -> int:
    tags = {name: compute_tag(image) for name, image in IMAGES.items()}
    print(json.dumps(tags) if output == "json" else "\n".join(f"{name}:{tag}" for name, tag in tags.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
