"""Ten questions about colibri's own documents, answered by the real models and judged without mercy.

In:  benchmarks/questions.json, a chat model, an embedder, a knowledge base of data/docs (made when it is not given)
Out: question by question: what was answered, what was cited, whether it was right; a total; --json for a file of results

A question is right when
  answerable:    every fact is in the answer (one of its spellings), and a cited passage lies in a document that has the fact;
  unanswerable:  the answer is that the documents do not say.
"""

import argparse
import json
import re
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from colibri_rag.embedder import EncoderEmbedder
from colibri_rag.knowledge_base import KnowledgeBase

from libcolibri.encoder import Encoder
from libcolibri.engine import Engine

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "data" / "docs"


@dataclass(frozen=True)
class Outcome:
    """One question and what became of it. retrieved: the search brought a document that has the answer."""

    question: str
    language: str
    answerable: bool
    answer: str
    refused: bool
    cited: list[str]
    unknown_citations: list[int]
    retrieved: bool
    has_facts: bool
    cites_source: bool
    matched: int  # citations put by comparing words
    seconds: float
    prompt_tok: int | None  # None where the model was not asked
    ttft_s: float | None
    decode_tok_s: float | None

    @property
    def right(self) -> bool:
        if not self.answerable:
            return self.refused
        return not self.refused and self.has_facts and self.cites_source


def holds(answer: str, words: list[str]) -> bool:
    """Whether one of the spellings stands in the answer; a bare number must stand alone: 4 is not found in 141 or in [4]."""
    plain = re.sub(r"\[\d+\]", " ", answer).lower()
    return any(bool(re.search(rf"(?<![\d.]){word}(?![\d]|\.\d)", plain)) if word.isdecimal() else word.lower() in plain for word in words)


def document_name(path: str) -> str:
    """'en/faq.md' for a path below data/docs, else the path."""
    resolved = Path(path).resolve()
    return resolved.relative_to(DOCS).as_posix() if resolved.is_relative_to(DOCS) else path


def judge(entry: dict[str, Any], kb: KnowledgeBase, session: Any) -> Outcome:
    """Ask one question in a fresh session and compare with what is expected."""
    started = time.perf_counter()
    hits: tuple[Any, ...] = ()
    result: Any = None
    for event in kb.ask(session, entry["question"]):
        hits = getattr(event, "hits", hits)
        result = getattr(event, "result", result)
    expected = {*entry["sources"], *entry["also"]}
    cited = [document_name(citation.path) for citation in result.citations]
    return Outcome(
        question=entry["question"],
        language=entry["language"],
        answerable=entry["answerable"],
        answer=result.text.strip(),
        refused=result.unanswerable,
        cited=cited,
        unknown_citations=list(result.unknown_citations),
        retrieved=any(document_name(hit.document.path) in expected for hit in hits),
        has_facts=all(holds(result.text, words) for words in entry["facts"]),
        cites_source=bool(expected & set(cited)),
        matched=len(result.matched),
        seconds=time.perf_counter() - started,
        prompt_tok=result.generation.prompt_tok if result.generation is not None else None,
        ttft_s=result.generation.ttft_s if result.generation is not None else None,
        decode_tok_s=result.generation.decode_tok_s if result.generation is not None else None,
    )


def describe(number: int, outcome: Outcome) -> str:
    """One question for reading."""
    reasons = []
    if outcome.answerable and outcome.refused:
        reasons.append("refused although the documents have it")
    elif outcome.answerable:
        reasons += [] if outcome.has_facts else ["the expected fact is missing"]
        reasons += [] if outcome.cites_source else ["no citation of a document that has it"]
        reasons += [] if outcome.retrieved else ["the search did not bring such a document"]
    elif not outcome.refused:
        reasons.append("answered although the documents do not say")
    if outcome.unknown_citations:
        reasons.append(f"cites numbers that do not exist: {outcome.unknown_citations}")
    speed = f", {outcome.prompt_tok} tok read, first word after {outcome.ttft_s:.1f} s" if outcome.ttft_s else ", the model was not asked"
    speed += f", {outcome.decode_tok_s:.1f} tok/s" if outcome.decode_tok_s else ""
    by_words = f", {outcome.matched} by words" if outcome.matched else ""
    return "\n".join(
        [
            f"{number:2}. [{'right' if outcome.right else 'WRONG'}] {outcome.question}",
            f"    answer: {' '.join(outcome.answer.split())}",
            f"    cited:  {', '.join(outcome.cited) or 'nothing'}{by_words}  ({outcome.seconds:.1f} s{speed})",
            *(f"    {reason}" for reason in reasons),
        ]
    )


def total(outcomes: list[Outcome]) -> str:
    """The sums that matter."""
    answerable = [outcome for outcome in outcomes if outcome.answerable]
    refusals = [outcome for outcome in outcomes if not outcome.answerable]
    right = sum(outcome.right for outcome in outcomes)
    return (
        f"{right} of {len(outcomes)} right: {sum(outcome.right for outcome in answerable)} of {len(answerable)} answerable, "
        f"{sum(outcome.right for outcome in refusals)} of {len(refusals)} unanswerable; "
        f"the search brought the document {sum(outcome.retrieved for outcome in answerable)} of {len(answerable)} times; "
        f"English {sum(o.right for o in outcomes if o.language == 'en')}, Chinese {sum(o.right for o in outcomes if o.language == 'zh')}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, required=True, help="chat model's directory")
    parser.add_argument("--embedder", type=Path, required=True, help="embedder's directory")
    parser.add_argument("--kb", type=Path, help="knowledge base that has data/docs; without it one is made and thrown away")
    parser.add_argument("--questions", type=Path, default=ROOT / "benchmarks" / "questions.json")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path, help="write all outcomes to this file")
    options = parser.parse_args()
    questions = json.loads(options.questions.read_text(encoding="utf-8"))
    outcomes = []
    with ExitStack() as stack:
        encoder = stack.enter_context(Encoder.open(options.embedder, threads=options.threads))
        folder = options.kb or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        kb = stack.enter_context(KnowledgeBase.open(folder, EncoderEmbedder(encoder)))
        kb.ingest([DOCS])
        engine = stack.enter_context(Engine.open(options.model, threads=options.threads))
        for number, entry in enumerate(questions, start=1):
            outcomes.append(judge(entry, kb, engine.new_session()))
            print(describe(number, outcomes[-1]), flush=True)
    print(total(outcomes))
    if options.json:
        records = [asdict(outcome) | {"right": outcome.right} for outcome in outcomes]
        options.json.write_text(json.dumps(records, ensure_ascii=False, indent=1), encoding="utf-8")
    return 0 if all(outcome.right for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
