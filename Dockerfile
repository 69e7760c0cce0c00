# A CPU image whose command is brim:
#     docker build -t brim .
#     docker run --rm brim                                   the demo
#     docker run --rm -v "$PWD:/data" -w /data brim audit model.py:make --input 8,3,224,224
FROM python:3.13-slim AS build
ARG TORCH=torch==2.13.0
# PyPI's torch for Linux brings CUDA's libraries along. https://download.pytorch.org/whl/cpu has one
# without, a tenth of the size.
ARG TORCH_INDEX=https://pypi.org/simple
ENV PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore PATH=/opt/brim/bin:$PATH
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/brim && pip install --index-url "$TORCH_INDEX" "$TORCH"
RUN pip install 'cmake>=3.25' ninja 'scikit-build-core>=0.10'
COPY . /src
RUN pip install --no-build-isolation '/src[plot]' \
 && pip uninstall -y cmake ninja scikit-build-core

FROM python:3.13-slim
COPY --from=build /opt/brim /opt/brim
ENV PATH=/opt/brim/bin:$PATH
RUN useradd --create-home brim
USER brim
WORKDIR /home/brim
ENTRYPOINT ["brim"]
CMD ["demo"]
