#!/usr/bin/env bash
# Makes elasticdl/rpc/elasticdl_pb2*.py from proto/ with grpcio-tools 1.62.3, whose code runs on protobuf 4.25 to 7.
# Needs a Python environment of its own: the generator pins an older protobuf than TensorFlow does.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${STUBS_VENV:-.venv-stubs}
[ -x "$venv/bin/python" ] || { python3 -m venv "$venv"; "$venv/bin/pip" install -q grpcio-tools==1.62.3 'setuptools<80'; }
"$venv/bin/python" -m grpc_tools.protoc -Iproto --python_out=elasticdl/rpc --pyi_out=elasticdl/rpc \
    --grpc_python_out=elasticdl/rpc proto/elasticdl.proto
sed -i 's/^import elasticdl_pb2 as/from elasticdl.rpc import elasticdl_pb2 as/' elasticdl/rpc/elasticdl_pb2_grpc.py
echo "elasticdl/rpc/elasticdl_pb2.py, elasticdl_pb2.pyi and elasticdl_pb2_grpc.py are up to date"
