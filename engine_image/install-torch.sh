#!/bin/sh
# Install PyTorch into /opt/millpond. For DEVICE=cpu the GPU libraries that `import torch` does not map are removed
# in the same layer: the wheel links some of them, so they must stay, and never loads the others without a GPU.
set -eu
# The installer lives in a cache mount: it serves the build and leaves nothing in the image.
python3 -m venv /opt/tools
/opt/tools/bin/pip install --quiet --no-cache-dir --require-hashes -r /tmp/build.txt
python3 -m venv --without-pip /opt/millpond
if [ -n "${PYTORCH_INDEX:-}" ]; then
    /opt/tools/bin/uv pip install --quiet --index-url "$PYTORCH_INDEX" "$(sed -n 's/^\(torch==[^ ]*\).*/\1/p' /tmp/torch.txt)"
else
    /opt/tools/bin/uv pip install --quiet --require-hashes --no-deps -r /tmp/torch.txt
fi
[ "$DEVICE" = cpu ] || exit 0
/opt/millpond/bin/python - <<'PY'
import pathlib, re, shutil, sysconfig

import torch

torch.ones(8, 8) @ torch.ones(8, 8)
site = pathlib.Path(sysconfig.get_paths()["purelib"])
mapped = set(re.findall(r"(/\S+\.so\S*)$", pathlib.Path("/proc/self/maps").read_text(), flags=re.MULTILINE))
for library in list(site.glob("nvidia/**/*.so*")) + list(site.glob("nvidia/**/*.a")):
    if str(library.resolve()) not in mapped:
        library.unlink()
for folder in ("triton", "torch/include", "torch/test"):
    shutil.rmtree(site / folder, ignore_errors=True)
for folder in site.glob("nvidia/**/include"):
    shutil.rmtree(folder)
PY
/opt/millpond/bin/python -c "import torch; assert (torch.ones(2, 2) @ torch.ones(2, 2)).sum() == 8"
find /opt/millpond -name __pycache__ -prune -exec rm -rf {} +
