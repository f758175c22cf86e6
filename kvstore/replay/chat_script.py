"""What is said in the demo of a real engine: a long system prompt that all users share."""

from __future__ import annotations

STREETS = (
    "Mill Street", "Harbour Road", "Castle Hill", "Station Square", "Orchard Lane", "North Gate",
    "Market Place", "River Walk", "Abbey Green", "Quarry Road", "Elm Avenue", "Lighthouse Point",
    "Garden Court", "Bridge End", "Sun Terrace", "Weavers Yard",
)  # fmt: skip
SUBJECTS = (
    "maps", "music", "gardening", "trains", "cooking", "stars", "poetry", "birds", "law",
    "chess", "ships", "painting",
    "dance", "money", "health", "weaving",
)  # fmt: skip
INTRODUCTION = (
    "You answer questions about the public libraries of a small town. Be friendly, brief and "
    "exact. Answer in one sentence. If the list below does not say it, say that you do not know. "
    "Books may be kept for four weeks, films for one. A card is free for everybody under eighteen "
    "and costs ten coins a year for others. Every branch is closed on public holidays. "
    "These are the branches:\n"
)
QUESTIONS = {
    "ada": (
        "When does the Mill Street branch open?",
        "And what is it known for?",
        "How long may I keep a film?",
    ),
    "ben": (
        "Which branch has books about birds?",
        "Is it open in the evening?",
        "What does a card cost?",
    ),
    "cleo": (
        "Where can I play chess?",
        "Who do I ask for there?",
        "May I return a book at another branch?",
    ),
}


def system_prompt(branches: int = len(STREETS)) -> str:
    """The introduction, and a paragraph for each branch."""
    return INTRODUCTION + "".join(map(_branch, range(branches)))


def _branch(number: int) -> str:
    street, subject = STREETS[number % len(STREETS)], SUBJECTS[number % len(SUBJECTS)]
    opens, closes = 8 + number % 3, 17 + number % 4
    return (
        f"Branch {number + 1}, {street}: open from {opens} to {closes} o'clock, on Saturdays until "
        f"noon. It is known for its books about {subject}, has {20 + 5 * number} seats and "
        f"{2 + number} computers, and its librarian is at desk {number + 3}. Books of any other "
        "branch may be returned here.\n"
    )


def first_turn(system: str, question: str) -> str:
    """The beginning of a conversation, as ChatML, up to where the answer begins."""
    return f"<|im_start|>system\n{system}<|im_end|>\n" + later_turn(question).lstrip("\n")


def later_turn(question: str) -> str:
    """What follows an answer that ended, up to where the next begins."""
    return f"\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
