# kvheadroom as a small image: built in one stage, run in another as a plain user on a read-only root.
#   docker build -t kvheadroom .
#   docker run --read-only -p 9878:9878 kvheadroom serve --target http://host:8000
#   with a config: docker run --read-only -p 9878:9878 -v ./kvheadroom.yaml:/etc/kvheadroom.yaml:ro \
#     -v /models:/models:ro kvheadroom serve --config /etc/kvheadroom.yaml
#   for the servers of this machine: docker run --read-only --user 0 --pid=host --network=host --cap-add SYS_PTRACE \
#     kvheadroom serve
FROM python:3.12-slim AS build
WORKDIR /build
RUN python -m venv /opt/kvheadroom
# Dependencies first: they change less often than the code, so their layer is kept.
COPY requirements.lock ./
RUN /opt/kvheadroom/bin/pip install --no-cache-dir --require-hashes -r requirements.lock
COPY pyproject.toml README.md LICENSE ./
COPY exporter ./exporter
COPY dashboards ./dashboards
# pip is of no use in the image that runs.
RUN /opt/kvheadroom/bin/pip install --no-cache-dir --no-deps . \
 && /opt/kvheadroom/bin/pip uninstall --yes pip

FROM python:3.12-slim
LABEL org.opencontainers.image.title="kvheadroom" \
      org.opencontainers.image.description="KV-cache headroom of running vLLM servers" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/kvheadroom /opt/kvheadroom
ENV PATH=/opt/kvheadroom/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# A number, so that Kubernetes can see that it is not root.
USER 65532:65532
EXPOSE 9878
HEALTHCHECK --interval=30s --timeout=3s --start-period=5s CMD \
  ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:9878/-/healthy', timeout=2)"]
ENTRYPOINT ["kvheadroom"]
CMD ["serve", "--help"]
