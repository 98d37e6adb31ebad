# pyfa on ROCm's PyTorch. Build from the checkout, after ci/wheel:
#     docker build -f docker/rocm.Dockerfile -t pyfa-rocm .
#     docker run --device /dev/kfd --device /dev/dri --group-add video pyfa-rocm
ARG BASE=rocm/pytorch:latest
FROM ${BASE}
COPY build/wheel/*.whl /tmp/wheel/
# The image's torch stays: without a build for ROCm before and after, the build of the image fails.
RUN python3 -c "import torch; assert torch.version.hip" \
    && python3 -m pip install --no-cache-dir /tmp/wheel/*.whl \
    && python3 -c "import torch; assert torch.version.hip" \
    && rm -r /tmp/wheel
CMD ["pyfa", "info"]
