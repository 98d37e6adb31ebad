# pyfa on a CUDA build of PyTorch. Build from the checkout, after ci/wheel:
#     docker build -f docker/cuda.Dockerfile -t pyfa-cuda .
#     docker run --gpus all pyfa-cuda
ARG BASE=pytorch/pytorch:latest
FROM ${BASE}
COPY build/wheel/*.whl /tmp/wheel/
# The image's torch must be a build for CUDA before and after the installation; otherwise the build
# fails. In images that have torch in the system's Python, pip needs PIP_BREAK_SYSTEM_PACKAGES.
RUN python3 -c "import torch; assert torch.version.cuda" \
    && PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --no-cache-dir /tmp/wheel/*.whl \
    && python3 -c "import torch; assert torch.version.cuda" \
    && rm -r /tmp/wheel
CMD ["pyfa", "info"]
