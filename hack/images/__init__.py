"""Build Millpond's three images from their Dockerfiles: docker where it runs, buildah elsewhere.

Where no registry is at hand the base images come from debootstrap, so the real Dockerfiles run
unchanged on a machine that has nothing but Debian's packages.
"""
