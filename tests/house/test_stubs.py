"""The committed protobuf stubs are those of proto/elasticdl.proto."""

from __future__ import annotations

import re
from pathlib import Path

from google.protobuf import descriptor_pb2

from elasticdl.rpc import elasticdl_pb2

ROOT = Path(__file__).resolve().parents[2]
_FIELD = re.compile(r"(?:repeated\s+|optional\s+)?(?:map<[^>]*>|[\w.]+)\s+(\w+)\s*=\s*(\d+)\s*;")
_VALUE = re.compile(r"(\w+)\s*=\s*(\d+)\s*;")
_METHOD = re.compile(r"rpc\s+(\w+)\s*\(\s*(?:stream\s+)?(\w+)\s*\)\s*returns\s*\(\s*(?:stream\s+)?(\w+)\s*\)")

Described = dict[str, set[tuple[str, ...]]]


def described_by_the_proto(text: str) -> Described:
    """Top-level messages, enums and services by name, with what is in them."""
    text = re.sub(r"//[^\n]*", "", text)
    found: Described = {}
    for head in re.finditer(r"\b(message|enum|service)\s+(\w+)\s*\{", text):
        depth, end = 1, head.end()
        while depth:
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        body = text[head.end() : end - 1]
        pattern = {"message": _FIELD, "enum": _VALUE, "service": _METHOD}[head.group(1)]
        found[head.group(2)] = {match.groups() for match in pattern.finditer(body)}
    return found


def described_by_the_stubs() -> Described:
    file = descriptor_pb2.FileDescriptorProto()
    elasticdl_pb2.DESCRIPTOR.CopyToProto(file)
    found: Described = {m.name: {(f.name, str(f.number)) for f in m.field} for m in file.message_type}
    found |= {e.name: {(v.name, str(v.number)) for v in e.value} for e in file.enum_type}
    for service in file.service:
        found[service.name] = {
            (m.name, m.input_type.split(".")[-1], m.output_type.split(".")[-1]) for m in service.method
        }
    return found


def test_the_stubs_are_up_to_date() -> None:
    proto = described_by_the_proto((ROOT / "proto" / "elasticdl.proto").read_text())
    assert proto == described_by_the_stubs(), "run scripts/gen_stubs.sh"


def test_a_change_of_the_proto_is_seen() -> None:
    text = (ROOT / "proto" / "elasticdl.proto").read_text()
    changed = text.replace("int64 generation = 3;", "int64 generation = 9;", 1)
    assert changed != text
    assert described_by_the_proto(changed) != described_by_the_stubs()


def test_the_stubs_need_no_newer_protobuf_than_we_declare() -> None:
    for name in ("elasticdl_pb2.py", "elasticdl_pb2_grpc.py"):
        text = (ROOT / "elasticdl" / "rpc" / name).read_text()
        assert "ValidateProtobufRuntimeVersion" not in text
        assert "_registered_method" not in text  # grpcio-tools newer than 1.62
