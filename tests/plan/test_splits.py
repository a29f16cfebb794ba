"""The splits that are looked at: every one of SGLang's for all GPUs, none twice, none that its rank layout has not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_sm120.plan.gpus import find
from sglang_sm120.plan.memory import Split
from sglang_sm120.plan.shapes import read_shape
from sglang_sm120.plan.splits import Candidate, all_reduce_obstacle, candidates, obstacles

NVFP4 = "glm-5-nvfp4"
PRO_6000, RTX_5090 = find("rtx-pro-6000"), find("rtx-5090")


def labels(gpus: int, nodes: int = 1) -> list[str]:
    return [candidate.label for candidate in candidates(gpus, nodes)]


def test_one_gpu_has_one_split() -> None:
    assert labels(1) == ["TP1"]


def test_two_gpus() -> None:
    assert set(labels(2)) == {
        "TP2", "TP2 EP2", "TP2, attention DP2", "TP2 EP2, attention DP2", "2 replicas of TP1", "PP2 x TP1",
    }  # fmt: skip
    assert labels(2)[0] == "TP2"


@pytest.mark.parametrize(("gpus", "nodes"), [(1, 1), (3, 1), (6, 1), (8, 1), (8, 2), (4, 3), (8, 16), (64, 1)])
def test_every_candidate_uses_all_gpus_in_a_way_that_sglang_has(gpus: int, nodes: int) -> None:
    found = candidates(gpus, nodes)
    assert len(found) == len({candidate.label for candidate in found})
    for candidate in found:
        split = candidate.split
        assert candidate.gpus == gpus * nodes
        assert split.nodes == nodes
        assert split.tp % split.ep == 0
        assert split.tp % split.dp_attention == 0
        # entrypoints/engine.py: a node gets pp // nodes whole stages, or a stage gets nodes // pp whole nodes
        assert split.pp % nodes == 0 or nodes % split.pp == 0
        assert nodes == 1 or candidate.replicas == 1


def test_on_two_nodes_stages_along_the_nodes_come_first_and_sums_across_them_last() -> None:
    found = candidates(8, 2)
    assert found[0].label == "PP2 x TP8 on 2 nodes"
    assert not found[0].sums_cross_nodes
    crossing = [candidate.sums_cross_nodes for candidate in found]
    assert crossing == sorted(crossing)
    assert any(candidate.label == "TP16 on 2 nodes" for candidate in found)


def test_groups_are_the_kv_caches_of_their_own() -> None:
    assert Candidate(Split(tp=8, dp_attention=4)).groups == 4
    assert Candidate(Split(tp=2), replicas=4).groups == 4
    assert Candidate(Split(tp=4, pp=2)).groups == 1


def test_what_sglang_asserts_for_nvfp4_and_mtp() -> None:
    nvfp4 = read_shape(NVFP4)
    assert not obstacles(nvfp4, Candidate(Split(tp=8, ep=8)))
    assert any("EP 1 or EP 8" in one for one in obstacles(nvfp4, Candidate(Split(tp=8, ep=4))))
    assert not obstacles(nvfp4, Candidate(Split(tp=4, pp=2)))
    assert any("MTP" in one for one in obstacles(nvfp4, Candidate(Split(tp=4, pp=2)), mtp=True))
    assert any("several nodes" in one for one in obstacles(nvfp4, Candidate(Split(tp=2, nodes=2), replicas=2)))


@pytest.mark.parametrize(
    ("split", "gpu", "word"),
    [
        (Split(tp=1), PRO_6000, "nothing to sum"),
        (Split(tp=8, pp=2, nodes=2), PRO_6000, "several nodes"),
        (Split(tp=8, dp_attention=2), PRO_6000, "attention data parallelism"),
        (Split(tp=6), PRO_6000, "2, 4 and 8"),
        (Split(tp=2), RTX_5090, "P2P"),
    ],
)
def test_the_all_reduce_declines_what_docs_all_reduce_says(split: Split, gpu, word: str) -> None:
    assert word in (all_reduce_obstacle(Candidate(split), gpu) or "")


def test_the_all_reduce_serves_its_world_sizes() -> None:
    from sglang_sm120.kernels.communication.all_reduce_rmsnorm.config import WORLD_SIZES

    served = [tp for tp in range(2, 17) if all_reduce_obstacle(Candidate(Split(tp=tp)), PRO_6000) is None]
    assert served == sorted(WORLD_SIZES)


@pytest.mark.parametrize(("ep", "served"), [(1, True), (2, False), (4, False), (8, True)])
def test_the_rule_on_ep_is_sglangs(ep: int, served: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own handler, with the runner that it takes for NVFP4 on these GPUs."""
    from sglang.srt.arg_groups import moe_hook

    view = SimpleNamespace(moe_runner_backend="flashinfer_cutlass", quantization="modelopt_fp4", ep_size=ep, tp_size=8)
    monkeypatch.setattr(moe_hook, "resolving_view", lambda args: view)
    monkeypatch.setattr(moe_hook, "resolved_view", lambda args: view)
    monkeypatch.setattr(moe_hook, "run_post_process_pass", lambda *args: None)
    found = [one for one in obstacles(read_shape(NVFP4), Candidate(Split(tp=8, ep=ep))) if "EP 1 or" in one]
    assert bool(found) != served
    if served:
        moe_hook.handle_moe_kernel_config(None)
    else:
        with pytest.raises(AssertionError, match="must be 1 or the same as the tensor parallel size"):
            moe_hook.handle_moe_kernel_config(None)


def test_the_rules_on_pipelines_and_replicas_are_sglangs(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.arg_groups import validation_hook

    drafting = SimpleNamespace(
        disable_overlap_schedule=True, speculative_algorithm="EAGLE", enable_multi_layer_eagle=False,
        disaggregation_mode="null", min_free_slots_delay=None,
    )  # fmt: skip
    with pytest.raises(AssertionError, match="only supported on prefill nodes"):
        validation_hook.check_pipeline_parallel_compat(drafting)
    validation_hook.check_pipeline_parallel_compat(SimpleNamespace(**{**vars(drafting), "speculative_algorithm": None}))
    replicas = SimpleNamespace(
        ep_join_mode=None, tp_size=2, pp_size=1, nnodes=2, pp_max_micro_batch_size=None, dp_size=2,
        disable_cuda_graph_padding=False, enable_torch_compile=False,
    )  # fmt: skip
    monkeypatch.setattr(validation_hook, "resolving_view", lambda args: replicas)
    with pytest.raises(AssertionError, match="multi-node data-parallel replicas are not supported"):
        validation_hook.check_server_args(None)
