# pyfa on ROCm's PyTorch. Build from the checkout, after ci/wheel:
#     docker build -f docker/rocm.Dockerfile -t pyfa-rocm .
#     docker run --device /dev/kfd --device /dev/dri --group-add video pyfa-rocm
ARG BASE=rocm/pytorch:latest
FROM ${BASE}
COPY build/wheel/*.whl /tmp/wheel/
# The image's torch must be a build for ROCm before and after the installation; otherwise the build
# fails. In images that have torch in the system's Python, pip needs PIP_BREAK_SYSTEM_PACKAGES.
RUN python3 -c "import torch; assert torch.version.hip" \
    && PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --no-cache-dir /tmp/wheel/*.whl \
    && python3 -c "import torch; assert torch.version.hip" \
    && rm -r /tmp/wheel
CMD ["pyfa", "info"]
