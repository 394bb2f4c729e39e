"""The list of cases is whole: one test each, named after it, with the report that it comes from."""

from __future__ import annotations

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent
REPORTS = """
1 vllm-project/vllm/pull/55461          2 novitalabs/pegaflow/issues/396        3 tkem/cachetools/issues/405
4 LMCache/LMCache/issues/2017           5 NVIDIA/TensorRT-LLM/pull/12834        6 vllm-project/vllm/issues/49176
7 vllm-project/vllm/issues/44294        8 kvcache-ai/Mooncake/issues/2827       9 encode/httpcore/issues/1093
10 python/cpython/issues/107505         11 vllm-project/vllm/issues/49902       12 vllm-project/vllm/issues/50031
13 vllm-project/vllm/issues/54779       14 vllm-project/vllm/pull/50321         15 vllm-project/vllm/pull/43674
16 sgl-project/sglang/issues/28653      17 LMCache/LMCache/issues/1981          18 llm-d/llm-d-kv-cache/issues/721
19 vllm-project/vllm/issues/54363       20 vllm-project/vllm/issues/57303       21 vllm-project/vllm/pull/46959
22 LMCache/LMCache/issues/1139          23 vllm-project/vllm/issues/44250       24 LMCache/LMCache/issues/5069
25 vllm-project/vllm/issues/55904       26 vllm-project/vllm/issues/48919       27 vllm-project/vllm/issues/46014
28 vllm-project/vllm/pull/50069         29 vllm-project/vllm-ascend/issues/7971 30 vllm-project/vllm/issues/45704
31 llm-d/llm-d-kv-cache/pull/680        32 ai-dynamo/dynamo/pull/10930          33 vllm-project/vllm/pull/48102
34 sgl-project/sglang/issues/26792      35 sgl-project/sglang/pull/21624        36 vllm-project/vllm/pull/47987
37 grantjenks/python-diskcache/issues/357                                       38 rustsec/advisory-db/pull/2024
"""
N_CASES = 46
BOTH = ("pytest.mark.usefixtures('layout')", "only_files")
"""What lets a case run over both layouts of the disk, or over one."""


def _cases() -> dict[int, tuple[str, str]]:
    """Number to name and docstring of every test that is a case."""
    found: dict[int, tuple[str, str]] = {}
    for path in sorted(HERE.glob("test_*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (
                match := re.match(r"test_a(\d\d)_", node.name)
            ):
                assert int(match[1]) not in found, f"case {match[1]} twice"
                decorators = {ast.unparse(each) for each in node.decorator_list}
                assert decorators <= {"virtual_time", *BOTH}, f"{node.name} is one test, whatever it tries"
                found[int(match[1])] = (node.name, ast.get_docstring(node) or "")
    return found


def test_every_case_is_one_test() -> None:
    """46 of them; those that somebody reported name the report."""
    cases = _cases()
    assert sorted(cases) == list(range(1, N_CASES + 1))
    by_number = {int(number): report for number, report in re.findall(r"(\d+) ([^\s/]+/\S+)", REPORTS)}
    assert sorted(by_number) == list(range(1, 39))
    for number, (name, text) in cases.items():
        assert len(text.splitlines()) > 2, f"{name} says what else of its kind was tried"
        if number in by_number:
            assert f"https://github.com/{by_number[number]}" in text, name
