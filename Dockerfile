# Podium for servers of your own: `podium worker`, `podium db upgrade` and the other commands, without the embedded
# servers and the local model. docker-compose.yml shows how the parts go together.

FROM python:3.11-slim-bookworm AS build
WORKDIR /src
RUN python -m venv /opt/podium
# Dependencies first: they change less often than the program, and this layer is then kept.
COPY pyproject.toml constraints.txt README.md LICENSE ./
RUN mkdir engine && touch engine/__init__.py \
    && /opt/podium/bin/pip install --no-cache-dir -c constraints.txt ".[litellm]" \
    && /opt/podium/bin/pip uninstall -y podium \
    && rm -rf engine build ./*.egg-info
COPY engine engine
COPY activities activities
COPY worker_pools worker_pools
COPY migrations migrations
RUN /opt/podium/bin/pip install --no-cache-dir --no-deps .

FROM python:3.11-slim-bookworm
# A volume takes over the owner and the mode of the folder that it is laid on.
RUN useradd --uid 10001 --home-dir /srv/podium --create-home podium \
    && install -d -m 700 -o podium -g podium /srv/podium/keys /srv/podium/audit
COPY --from=build /opt/podium /opt/podium
ENV PATH=/opt/podium/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER podium
WORKDIR /srv/podium
ENTRYPOINT ["podium"]
CMD ["--help"]
