# An image for CPUs that trains, keeps rows as a server, and answers requests. From the repository's folder:
#
#   docker build -t lightning-recsys . && mkdir -p work
#   docker run --rm --shm-size=2g -v "$PWD/work:/work" lightning-recsys train                       # runs go to work/logs
#   docker run --rm -v "$PWD/work:/work" lightning-recsys server --make-keys job.keys
#   docker run --rm -p 5790:5790 -v "$PWD/work:/work" lightning-recsys server --folder tables --bind tcp://0.0.0.0:5790 --keys job.keys
#   docker run --rm --shm-size=2g -p 8000:8000 -v "$PWD/work:/work" lightning-recsys serve url=/work/published host=0.0.0.0
#
# Tables and replicas lie in /dev/shm, of which Docker gives 64 MiB unless --shm-size says more. The image runs as user 1000,
# who has to be able to write to the folder that is mounted at /work.
FROM python:3.12-slim

ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1
RUN pip install --extra-index-url https://download.pytorch.org/whl/cpu "torch==2.13.0+cpu"

COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE /source/
COPY conf /source/conf
COPY recipes /source/recipes
COPY lightning_recsys /source/lightning_recsys
RUN pip install "/source[serving]" && rm -r /source

RUN useradd --uid 1000 --create-home user && install --directory --owner=user /work
USER user
WORKDIR /work
ENTRYPOINT ["lightning-recsys"]
CMD ["--help"]
