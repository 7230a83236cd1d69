# Serving, with the example server: `docker build -f docker/serve.Dockerfile -t kda-serve .`, then
# `docker run --gpus all -p 8000:8000 kda-serve`.  The rest is as in train.Dockerfile.  Weights are random, and so is the
# text, unless a model is mounted: `-v $PWD/runs/train:/model`, and behind the image's name the command with `--model /model`.
FROM python:3.12-slim
RUN apt-get update && apt-get install -y --no-install-recommends gcc g++ libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/kda
COPY . .
RUN pip install --no-cache-dir -c constraints.txt -c tests/peers/requirements.txt ./ptxkit . starlette uvicorn
ARG ARCH=
ENV KDA_CACHE_DIR=/var/cache/kda
RUN install -d -m 755 "$KDA_CACHE_DIR" && if [ -n "$ARCH" ]; then kda compile --arch "$ARCH"; fi
RUN kda selftest --quick --backend reference
EXPOSE 8000
CMD ["python", "examples/serve.py", "--host", "0.0.0.0", "--port", "8000"]
