"""Prompts of the demo and of the CPU benchmark: three domains, written for this project.

The drafter was not trained on them; the accepted length per domain is measured on these.
"""

from __future__ import annotations

from dataclasses import dataclass

DOMAINS = ("math", "code", "chat")


@dataclass(frozen=True)
class Prompt:
    """One user message. `name` is stable: results refer to it."""

    name: str
    domain: str
    text: str


_MATH = (
    "A baker fills 18 trays with 24 rolls each and sells 295 rolls before noon. How many rolls are "
    "left? Reason step by step.",
    "A train covers 150 km in 2 hours and then 90 km in 1.5 hours. What is its average speed over "
    "the whole trip? Reason step by step.",
    "Lena saves 35 euros every month. She already has 120 euros and wants a bicycle for 470 euros. "
    "After how many months can she buy it? Reason step by step.",
    "A rectangle is three times as long as it is wide, and its perimeter is 64 cm. Find its area. "
    "Reason step by step.",
    "Solve for x: 5x - 7 = 3x + 19. Show every step.",
    "A shirt costs 80 dollars. Its price is cut by 15 percent, and the new price by another 10 "
    "percent. What does it cost now? Reason step by step.",
    "A tank holds 600 liters. One pipe fills 25 liters a minute while a leak loses 5 liters a "
    "minute. How long until the empty tank is full? Reason step by step.",
    "What is the sum of all whole numbers from 1 to 60? Explain the formula you use.",
    "Two dice are rolled. What is the probability that the numbers add up to 9? Reason step by "
    "step.",
    "Find the greatest common divisor of 168 and 252 with the Euclidean algorithm. Show every "
    "step.",
    "A class has 28 students. Three quarters of them play a sport, and a third of those play "
    "football. How many play football? Reason step by step.",
    "The sides of a right triangle next to the right angle are 9 cm and 12 cm long. How long is "
    "the third side? Reason step by step.",
)

_CODE = (
    "Write a Python function that returns the n-th Fibonacci number without recursion.",
    "Write a Python function that checks whether a string is a palindrome, ignoring case and "
    "spaces.",
    "Write a Python function that merges two sorted lists into one sorted list.",
    "Write a Python class for a stack with the methods push, pop, peek and is_empty.",
    "Write a Python function that counts how often each word occurs in a text and returns a "
    "dictionary.",
    "Write a Python function for binary search in a sorted list. Return -1 if the value is not "
    "there.",
    "Write a JavaScript function that removes duplicate values from an array.",
    "Write a SQL query that lists the five customers with the highest total order amount.",
    "Write a Python function that transposes a matrix given as a list of lists.",
    "Write a C function that computes the factorial of a non-negative integer.",
    "Write a Python function that reads a CSV file and returns its rows as a list of dictionaries.",
    "Write a Python function that returns all prime numbers up to n with the sieve of "
    "Eratosthenes.",
)

_CHAT = (
    "Explain in simple words why the sky is blue.",
    "What should I pack for a three-day hiking trip in autumn?",
    "Write a short friendly email that asks a colleague to move our meeting to Thursday.",
    "What are the advantages and disadvantages of working from home?",
    "Tell me a short story about a lighthouse keeper who finds a message in a bottle.",
    "How do vaccines work? Explain it to a twelve-year-old.",
    "Suggest five ideas for a rainy Sunday with two small children.",
    "Summarize what photosynthesis is and why it matters.",
    "I cannot fall asleep at night. What can I try?",
    "Describe the city of Venice to someone who has never been there.",
    "What is the difference between weather and climate?",
    "Give me a simple recipe for a vegetable soup.",
)


def prompts_of(domain: str) -> list[Prompt]:
    """All prompts of one domain, in a fixed order."""
    texts = {"math": _MATH, "code": _CODE, "chat": _CHAT}[domain]
    return [Prompt(f"{domain}-{index}", domain, text) for index, text in enumerate(texts)]


def choose_prompts(per_domain: int) -> list[Prompt]:
    """The first `per_domain` prompts of every domain, domains interleaved."""
    columns = [prompts_of(domain)[:per_domain] for domain in DOMAINS]
    return [prompt for row in zip(*columns, strict=True) for prompt in row]
