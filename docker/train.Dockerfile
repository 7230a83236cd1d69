# Training: `docker build -f docker/train.Dockerfile -t kda-train .`, then
# `docker run --gpus all -v $PWD/runs:/opt/kda/runs kda-train`, which keeps the model in runs/train.
# The wheels bring CUDA; the host needs its driver and the NVIDIA container toolkit alone.  With `--build-arg ARCH=h100`
# the kernels are built here, otherwise at the first step.  A test runs these steps in a bare environment of Python.
FROM python:3.12-slim
RUN apt-get update && apt-get install -y --no-install-recommends gcc g++ libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/kda
COPY . .
RUN pip install --no-cache-dir -c constraints.txt ./ptxkit '.[plot]'
ARG ARCH=
ENV KDA_CACHE_DIR=/var/cache/kda
RUN install -d -m 755 "$KDA_CACHE_DIR" && if [ -n "$ARCH" ]; then kda compile --arch "$ARCH"; fi
RUN kda selftest --quick --backend reference
CMD ["python", "examples/train.py"]
