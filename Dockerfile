# sqz on Debian 12: the tools, and Python with the wheel in /opt/sqz. Both steps are scripts/image.
#   docker build -t sqz .                                     then: docker run sqz sqz-index --help
#   docker build -t sqz-vllm --build-arg EXTRAS=[vllm] .      then: docs/vllm.md
# These are for CPUs. For GPUs, give --build-arg FROM= an image of Debian 12 with nvcc.
ARG FROM=debian:bookworm-slim
FROM $FROM AS build
COPY . /root/sqz
RUN cd /root/sqz && scripts/image build

FROM debian:bookworm-slim
ARG EXTRAS=
COPY --from=build /root/sqz/out /root/sqz/out
COPY scripts/image /root/sqz/scripts/
RUN cd /root/sqz && scripts/image install "$EXTRAS" && rm -rf /root/sqz
ENV PATH=/opt/sqz/bin:$PATH
