"""Energy is counted actions times entries of a table: counts by hand, sources, and an audit that recounts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
from synthetic import chain, hardware, machine

from pbsim import simulate
from pbsim.config import Hardware
from pbsim.config.files import read_source
from pbsim.config.hardware import Energy
from pbsim.hardware.energy import (
    ACTIONS,
    CONFIDENCE,
    CoreActions,
    EnergyAccount,
    count_actions,
    energy_account,
    energy_table,
    pipelined,
    shipped_tables,
)
from pbsim.results.audit import Audit, AuditError
from pbsim.results.terminal import rows
from pbsim.schedule import Batches, run_pipeline

SAMPLES = 5
SMALL = {
    "name": "small",
    "model": {"factory": "pbsim.network.zoo:mlp", "arguments": {"features": 12, "hidden": [8, 6], "classes": 4}},
    "data": {"kind": "random", "shape": [12], "classes": 4, "train_samples": 40, "test_samples": 10},
    "training": {"batch_size": 4, "lr": 0.05, "momentum": 0.9},
}


# --- tables --------------------------------------------------------------------------------------------


def entries(table: dict[str, Any]):
    """Every entry of a table, with its place."""
    for action, entry in table.items():
        if isinstance(entry, list):
            yield from ((f"{action} {point['kib']}", point) for point in entry)
        elif "pj" in entry:
            yield action, entry
        else:
            yield from ((f"{action} {datatype}", inner) for datatype, inner in entry.items())


@pytest.mark.parametrize("name", shipped_tables())
def test_every_shipped_entry_has_a_source_and_a_confidence(name):
    table = shipped_tables()[name]
    assert set(table) <= set(ACTIONS)
    for place, entry in entries(table):
        assert entry["pj"] > 0, place
        assert entry["source"], place
        assert entry["confidence"] in CONFIDENCE, place
        assert set(entry) <= {"pj", "source", "confidence", "kib"}, place


def test_a_hardware_file_may_name_every_shipped_table_and_no_other():
    names = [get_args(option) for option in get_args(Energy.model_fields["table"].annotation)]
    assert {name for option in names for name in option} == set(shipped_tables())


@pytest.mark.parametrize(
    ("datatype", "mac"),
    [
        ("float16", 1.5),  # multiply 1.1 + add 0.4
        ("float32", 4.6),  # multiply 3.7 + add 0.9
        ("bfloat16", 1.5),
        ("float64", 0.0),  # no figure: no entry
    ],
)
def test_a_mac_costs_what_its_datatype_does(datatype, mac):
    table = energy_table(hardware("mesh", datatype=datatype))
    assert table.pj("mac") == mac
    assert ("mac" in table.entries) == (mac > 0)


@pytest.mark.parametrize(
    ("kib", "pj", "confidence"),
    [
        (4, 1.25, "page"),  # below the smallest: 10 pJ for 8 bytes
        (8, 1.25, "page"),
        (32, 2.5, "recalled"),
        (16, (1.25 * 2.5) ** 0.5, "recalled"),  # half way between 8 and 32 on a log-log line: the geometric mean
        (1024, 12.5, "recalled"),
        (4096, 12.5, "recalled"),
    ],
)
def test_a_byte_of_sram_costs_what_its_capacity_does(kib, pj, confidence):
    entry = energy_table(hardware("mesh", core__sram_kib=float(kib))).entries["sram_byte"]
    assert entry.pj == pytest.approx(pj, rel=1e-12)
    assert entry.confidence == confidence


def test_between_figures_that_were_read_a_figure_is_derived():
    entry = energy_table(hardware("mesh", energy={"table": "7nm"})).entries["sram_byte"]
    assert entry.confidence == "derived"
    assert "for 48 KiB" in entry.source
    assert "Jouppi" in entry.source


def test_memory_is_not_scaled_as_logic_is():
    old, new = (energy_table(hardware("mesh", energy={"table": name})) for name in ("horowitz_45nm", "7nm"))
    assert new.pj("mac") == pytest.approx(0.094 * old.pj("mac"))
    assert new.pj("sram_byte") > 0.3 * old.pj("sram_byte")


def test_seven_nanometres_agree_with_the_power_of_a_wafer_scale_core():
    # 30 mW at 1.1 GHz are 27 pJ a cycle: 24 bytes of SRAM and 4 fp16 multiply-adds (HARDWARE.md 3.2)
    table = energy_table(hardware("mesh", energy={"table": "7nm"}))
    assert 24 * table.pj("sram_byte") + 4 * table.pj("mac") == pytest.approx(30e-3 / 1.1e9 * 1e12, rel=0.1)


def test_inline_entries_replace_and_complete_a_table():
    inline = {"pj": 7.0, "source": "a datasheet"}
    table = energy_table(hardware("mesh", energy={"table": "7nm", "mac": inline, "leakage": inline}))
    assert (table.name, table.pj("mac"), table.pj("leakage")) == ("7nm", 7.0, 7.0)
    assert table.pj("host_byte") == 31.8
    assert (table.entries["mac"].source, table.entries["mac"].confidence) == ("a datasheet", "")
    alone = energy_table(hardware("mesh", energy={"mac": {**inline, "confidence": "assumed"}}))
    assert (alone.name, set(alone.entries), alone.entries["mac"].confidence) == ("inline", {"mac"}, "assumed")


def test_without_a_table_there_is_no_energy():
    made = machine(chain(2))
    assert made.hardware.energy is None
    assert energy_account(made, pipelined(made, SAMPLES, SAMPLES, 100)) is None


# --- counts --------------------------------------------------------------------------------------------


def test_actions_of_two_cores_by_hand():
    made = machine(chain(2), "mesh", core__pes=3, pipeline__allocation="uniform")
    first, second = count_actions(made, pipelined(made, SAMPLES, SAMPLES, 1000))
    hops = 2, 2  # cores of 1 x 3 PEs beside each other: from the centre of one to the edge of the other, either way
    # Per sample, values of 10 elements, 8 weights, 2 bytes each. Stage 0 has no Bx.
    assert first == CoreActions(
        macs=SAMPLES * (64 + 64),  # F, Bw
        vector_ops=SAMPLES * (8 + 8 + 16),  # F, Bw, and 2 multiply-adds per weight in U
        # F: input, weights, output. Bw: gradient, input, weights. U: read w, v, g and write w, v
        operation_bytes=SAMPLES * 2 * ((10 + 8 + 10) + (10 + 10 + 8) + 5 * 8),
        message_bytes=SAMPLES * 2 * (10 + 10),  # the activation is read here, the gradient written
        host_bytes=SAMPLES * 2 * 10,
        link_byte_hops=SAMPLES * 2 * 10 * hops[0],  # the activation; the gradient is the other core's
        pe_cycles=3 * 1000,
    )
    assert second == CoreActions(
        macs=SAMPLES * (64 + 64 + 64),  # F, Bx, Bw
        vector_ops=SAMPLES * (8 + 8 + 8 + 16),
        # Bx: gradient of the output, weights, gradient of the input
        operation_bytes=SAMPLES * 2 * ((10 + 8 + 10) + (10 + 8 + 10) + (10 + 10 + 8) + 5 * 8),
        message_bytes=SAMPLES * 2 * (10 + 10),
        host_bytes=0,
        link_byte_hops=SAMPLES * 2 * 10 * hops[1],
        pe_cycles=3 * 1000,
    )
    # SRAM: operations, messages, and what the host writes
    assert first.counts["sram_byte"] == first.operation_bytes + first.message_bytes + first.host_bytes
    assert tuple(first.counts) == ACTIONS


def test_updates_may_be_fewer_than_samples():
    made = machine(chain(2), "mesh", core__pes=3, pipeline__allocation="uniform")
    often, once = (count_actions(made, pipelined(made, SAMPLES, updates, 1000))[0] for updates in (SAMPLES, 1))
    # four updates less: 2 multiply-adds and 5 elements of 2 bytes for each of 8 weights
    assert often.vector_ops - once.vector_ops == 4 * 16
    assert often.operation_bytes - once.operation_bytes == 4 * 2 * 40
    assert often.macs == once.macs


def test_energy_is_the_sum_of_counts_times_entries():
    inline = {action: {"pj": float(10**k), "source": "a test"} for k, action in enumerate(ACTIONS)}
    made = machine(chain(2), "mesh", core__pes=3, pipeline__allocation="uniform", energy=inline)
    account = energy_account(made, pipelined(made, SAMPLES, SAMPLES, 1000))
    expected = sum(10**k * core.counts[action] for core in account.cores for k, action in enumerate(ACTIONS))
    assert account.joules == pytest.approx(expected * 1e-12, rel=1e-12)
    assert account.zero_actions == []


# --- audit ---------------------------------------------------------------------------------------------


def audited_run() -> tuple[Audit, EnergyAccount]:
    net = chain(4, elements=[3, 5, 2, 4, 1], skips=((0, 3),))
    made = machine(net, "mesh", core__pes=2, pipeline__allocation="uniform")
    timing, chunks = run_pipeline(made, Batches(SAMPLES))
    audit = Audit(made, net, timing)
    for chunk in chunks:
        audit.watch(chunk)
    audit.finish()
    account = energy_account(made, pipelined(made, timing.samples, timing.samples, timing.cycles))
    assert account is not None
    return audit, account


def test_counted_actions_pass_the_audit():
    audit, account = audited_run()
    audit.check_energy(account)


COOKED = {
    "macs": "counts 961 MACs, seen 960",
    "vector_ops": "vector operations",
    "operation_bytes": "SRAM bytes of operations",
    "message_bytes": "SRAM bytes of messages",
    "host_bytes": "bytes from the host",
    "pe_cycles": "PE-cycles",
    "link_byte_hops": "byte-hops counted",
}


@pytest.mark.parametrize("count", COOKED)
def test_a_cooked_count_is_named(count):
    audit, account = audited_run()
    cores = list(account.cores)
    cores[1] = replace(cores[1], **{count: getattr(cores[1], count) + 1})
    with pytest.raises(AuditError, match=COOKED[count]):
        audit.check_energy(replace(account, cores=tuple(cores)))


def test_energy_that_is_not_that_of_the_counts_is_named(monkeypatch):
    audit, account = audited_run()
    joules = account.joules
    monkeypatch.setattr(EnergyAccount, "joules", joules * 1.001)
    with pytest.raises(AuditError, match="the sum of counts times entries"):
        audit.check_energy(account)


# --- runs ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run():
    return simulate("mesh", SMALL, samples=30, timing_only=True)


def with_energy(**energy: Any):
    document = read_source(Hardware, "mesh").document
    return simulate({**document, "energy": energy}, SMALL, samples=30, timing_only=True)


def test_a_run_accounts_for_its_energy(run):
    table, s = run.energy, run.summary
    assert set(table["action"]) == set(ACTIONS)
    assert len(table) == len(run.stages) * len(ACTIONS)
    each = table["picojoules_each"].fillna(0)
    np.testing.assert_allclose(table["picojoules"], table["count"] * each, rtol=1e-12)
    assert s["energy_joules"] == pytest.approx(1e-12 * table["picojoules"].sum(), rel=1e-12)
    by_action = 1e-12 * table.groupby("action")["picojoules"].sum()
    assert s["energy_joules_by_action"] == pytest.approx(by_action.to_dict(), rel=1e-12)
    assert s["energy_zero_actions"] == ["leakage"]
    count = table.groupby("action")["count"].sum()
    macs = run.stages[["macs_forward", "macs_input_gradient", "macs_weight_gradient"]].sum().sum()
    assert count["mac"] == 30 * macs
    assert count["link_byte_hop"] >= run.links["bytes"].sum()  # a link is crossed in one step, a core in several
    assert count["leakage"] == s["cycles"] * run.stages["pes"].sum()
    written = table.loc[table["source"] != "", "confidence"]
    assert written.isin(CONFIDENCE).all()


def test_operations_are_a_table_whose_terms_add_up(run):
    table = run.operations.set_index(["stage", "op"])
    assert (table[["compute", "vector", "sram", "overhead"]].sum(axis=1) == table["total"]).all()
    stages = run.stages.set_index("stage")
    for op in ("forward", "input_gradient", "weight_gradient", "update"):
        assert (table.xs(op, level="op")["total"] == stages[f"cycles_{op}"]).all()
        if op != "update":
            assert (table.xs(op, level="op")["macs"] == stages[f"macs_{op}"]).all()
    efficiency = table["mapping_efficiency"]
    assert (efficiency.notna() == (table["macs"] > 0)).all()
    assert efficiency.dropna().between(0, 1).all()
    busy = table["sram_bytes"].groupby("stage").sum() * 30
    messages_too = run.energy[run.energy["action"] == "sram_byte"].set_index("core")["count"]
    assert (busy < messages_too).all()  # messages and the host come on top


@pytest.mark.parametrize("action", ["mac", "vector_op", "sram_byte", "link_byte_hop", "host_byte"])
def test_doubling_an_entry_adds_the_share_of_its_action(run, action):
    """How sensitive a run's energy is to one figure: the whole of it, to each in its share."""
    each = run.energy.loc[run.energy["action"] == action, "picojoules_each"].iloc[0]
    doubled = with_energy(table="horowitz_45nm", **{action: {"pj": 2 * each, "source": "doubled"}})
    share = run.summary["energy_joules_by_action"][action]
    assert share > 0
    assert doubled.summary["energy_joules"] == pytest.approx(run.summary["energy_joules"] + share, rel=1e-12)
    assert doubled.summary["cycles"] == run.summary["cycles"]


def test_actions_that_add_nothing_are_listed_with_the_reason():
    free = {"pj": 0, "source": "free"}
    made = with_energy(mac=free, host_byte={"pj": 1, "source": "a test"}, link_byte_hop={"pj": 1, "source": "a test"})
    assert made.summary["energy_table"] == "inline"
    assert made.summary["energy_zero_actions"] == ["mac", "vector_op", "sram_byte", "leakage"]
    said = dict(rows(made))
    expected = "mac (0 pJ), vector_op (no entry), sram_byte (no entry), leakage (no entry)"
    assert said["energy counts as 0"] == expected
    assert said["energy goes to"].startswith(("host_byte", "link_byte_hop"))


def test_without_a_table_energy_is_null_and_said_to_be():
    made = simulate("lockstep_ideal", SMALL, samples=5, timing_only=True)
    keys = ("energy_joules", "energy_table", "energy_joules_by_action", "energy_zero_actions")
    assert [made.summary[key] for key in keys] == [None] * 4
    assert len(made.energy) == 0
    assert dict(rows(made))["energy"] == "not counted: the hardware file has no [energy] table"


@pytest.mark.parametrize("dataflow", ["os", "ws", "is"])
def test_a_systolic_machine_runs_and_accounts_for_itself(dataflow):
    document = read_source(Hardware, "mesh").document
    datapath = {"kind": "systolic", "rows": 8, "cols": 8, "dataflow": dataflow, "weights": "resident"}
    made = simulate({**document, "core": {**document["core"], "datapath": datapath}}, SMALL, samples=10)
    assert made.summary["status"] == "finished"
    efficiency = made.operations["mapping_efficiency"].dropna()
    assert efficiency.between(0, 1).all()
    assert (efficiency < 0.2).all()  # batch one leaves an array nearly empty
