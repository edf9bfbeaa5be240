"""Descriptions of machines: what is read, and one sentence with the key for what cannot be."""

import math
import os
from pathlib import Path

import pytest

from lightning_recsys.planning import machines_from, read_machines
from lightning_recsys.planning.this_machine import main


def test_machines_when_read_then_ports_are_bytes_and_memory_is_bytes(tmp_path):
    path = tmp_path / "machines.yaml"
    path.write_text("cpu: {number: 4, cores: 8, memory_gib: 2, port_gbit: 10, latency_us: 20}\nsmall: {}\n")
    machines = read_machines(path)
    cpu = machines.kinds["cpu"]
    assert (cpu.number, cpu.cores, cpu.memory) == (4, 8, 2 * 2**30)
    # Of a full packet of 1514 bytes 66 are Ethernet's, IP's and TCP's.
    assert cpu.port.bandwidth == pytest.approx(1.25e9 * 1448 / 1514)
    assert cpu.port.latency == pytest.approx(20e-6)
    assert machines.kinds["small"].memory == math.inf


EXAMPLES = Path(__file__).parents[3] / "examples/machines"


def test_clusters_of_papers_when_read_then_each_has_its_machines():
    number = {path.stem: {k: x.number for k, x in read_machines(path).kinds.items()} for path in EXAMPLES.iterdir()}
    assert number == {
        "shadowsync": {"trainer": 20, "server": 22},
        "hierarchical": {"machine": 120},
        "het": {"worker": 8, "server": 1},
        "des": {"machine": 4},
        "async_ps": {"worker": 3000, "server": 100},
    }


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({"cpu": {"cores": 0}}, r"machines\.cpu\.cores must be at least 1, got 0\."),
        ({"cpu": {"cors": 2}}, r"machines\.cpu has no key 'cors'\. Did you mean 'cores'\?"),
        ({"cpu": {"port_gbit": 1e-9}}, r"machines\.cpu\.port_gbit must be at least 8e-9, a byte a second"),
        ({"cpu": {"memory_gib": 0}}, r"machines\.cpu\.memory_gib must be above 0, got 0\."),
        ({"cpu": {"price": -1}}, r"machines\.cpu\.price must be a finite number of at least 0, got -1\."),
        ({"cpu": {"cores": "many"}}, r"machines\.cpu\.cores must be a whole number, got 'many'\."),
        ({"cpu": 3}, r"machines\.cpu must be a mapping"),
        ({}, r"machines must have at least one kind\."),
        ([], r"machines must be a mapping"),
        ({"cpu": {}, "racks": {"oversubscription": 0.5}}, r"machines\.racks\.oversubscription must be a finite number"),
        ({"cpu": {}, "racks": {"size": 4}}, r"machines\.racks has no key 'size'"),
    ],
)
def test_machines_when_a_key_is_wrong_then_one_sentence_names_it(data, sentence):
    with pytest.raises(ValueError, match=sentence) as refusal:
        machines_from(data)
    assert "\n" not in str(refusal.value)


def test_machines_file_when_there_is_none_or_it_is_no_yaml_then_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no file of machines"):
        read_machines(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("cpu: {cores: 1\n")
    with pytest.raises(ValueError, match="is not a list of machines"):
        read_machines(tmp_path / "bad.yaml")


def test_port_when_racks_share_a_way_out_then_has_its_part_of_it():
    entry = {"number": 8, "port_gbit": 10}
    flat = machines_from({"cpu": entry})
    racks = machines_from({"cpu": entry, "racks": {"machines_per_rack": 4, "oversubscription": 7}})
    whole = flat.port("cpu", 8).bandwidth
    assert racks.port("cpu", 4).bandwidth == whole  # of one rack nothing leaves it
    # With 8 machines 4 of the 7 others are in the other rack: 4/7 of the bytes pass a way out of 1/7 of the ports.
    assert racks.port("cpu", 8).bandwidth == pytest.approx(whole / 4)


def test_machine_when_measured_then_prints_an_entry_that_a_plan_reads(capsys, tmp_path):
    assert main(["--name", "here", "--seconds", "0.02"]) == 0
    path = tmp_path / "machines.yaml"
    path.write_text(capsys.readouterr().out)
    here = read_machines(path).kinds["here"]
    assert here.cores == os.cpu_count()
    assert here.memory == pytest.approx(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), rel=0.1)
    assert here.gflops > 0
    assert "encrypted and decrypted: 0 MB/s" not in path.read_text()
    with pytest.raises(SystemExit):
        main(["--seconds", "0"])
