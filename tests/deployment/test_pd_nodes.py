import json
import sys
from types import ModuleType

import pytest

from isochunk.cli.proxy import read_arguments
from isochunk.core.errors import ConfigError
from isochunk.deployment import pd_nodes
from isochunk.deployment.pd_nodes import Node, need_connector, node_environ, node_options, proxy_command
from isochunk.proxy.config import Role


def test_an_unknown_connector_is_named_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"--connector 'nccl' must be one of nixl, mooncake"):
        need_connector("nccl")


@pytest.mark.parametrize("connector", ["nixl", "mooncake"])
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    connector: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pd_nodes, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"--connector {connector} needs the package \w+: pip install"):
        need_connector(connector)


def test_a_missing_library_of_mooncake_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(ModuleType):
        def __getattr__(self, name: str) -> object:
            raise ImportError(f"libibverbs.so.1: cannot open shared object file ({name})")

    monkeypatch.setattr(pd_nodes, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "mooncake", Broken("mooncake"))
    monkeypatch.delitem(sys.modules, "mooncake.engine", raising=False)
    with pytest.raises(ConfigError, match="libibverbs"):
        need_connector("mooncake")


@pytest.mark.parametrize("connector", ["nixl", "mooncake"])
def test_nodes_of_both_roles_name_the_same_connector(connector: pd_nodes.Connector) -> None:
    configs = [json.loads(node_options(connector, role)[1]) for role in ("kv_producer", "kv_consumer")]
    assert [config.pop("kv_role") for config in configs] == ["kv_producer", "kv_consumer"]
    assert configs[0] == configs[1]
    assert node_environ(connector, "10.0.0.1", 5600, "eth0")["VLLM_HOST_IP"] == "10.0.0.1"


def test_the_proxy_is_told_of_every_node_and_of_mooncakes_bootstrap_ports() -> None:
    nodes = [Node("http://10.0.0.1:8000", 9000), Node("http://10.0.0.2:8001", 9001)]
    decoders = [Node("http://10.0.0.3:8000", 9000)]
    config, given = read_arguments(proxy_command("mooncake", nodes, decoders, 7000))
    assert given.port == 7000
    assert [(spec.name, spec.bootstrap) for spec in config.nodes[Role.PREFILL]] == [
        ("10.0.0.1:8000", "http://10.0.0.1:9000"),
        ("10.0.0.2:8001", "http://10.0.0.2:9001"),
    ]
    assert [spec.name for spec in config.nodes[Role.DECODE]] == ["10.0.0.3:8000"]
    config, _ = read_arguments(proxy_command("nixl", nodes, decoders, 7000))
    assert {spec.bootstrap for spec in config.nodes[Role.PREFILL]} == {None}
