"""Templates and words that `prompts.derive` combines; `{name}` is filled from WORDS[name]."""

from __future__ import annotations

import random
import re

_SLOT = re.compile(r"\{([a-z_]+)\}")


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]


WORDS: dict[str, list[str]] = {
    "topic": _words(
        "climate change, remote work, electric cars, social media, artificial intelligence, "
        "space travel, healthy eating, meditation, renewable energy, online education, "
        "public transport, video games, the Roman Empire, the French Revolution, jazz music, "
        "photosynthesis, black holes, vaccination, inflation, machine learning, chess, "
        "mountain climbing, ocean pollution, the water cycle, ancient Egypt, cryptocurrency, "
        "cooking at home, sleep, gardening, urban planning, volunteering, travelling alone, "
        "learning a new language, dogs, cats, coffee, the moon landing, evolution, gravity, "
        "democracy, minimalism, time management, electric bicycles, robots, museums, "
        "modern art, classical music, football, yoga, the stock market, supply and demand, "
        "coral reefs, earthquakes, volcanoes, genetic engineering, nuclear power, solar panels, "
        "self-driving cars, cyber security, cloud computing, databases, microservices, "
        "the human heart, the immune system, antibiotics, mental health, friendship, "
        "leadership, negotiation, public speaking, job interviews, personal finance, "
        "small businesses, marketing, customer service, e-commerce, tourism, fashion, "
        "architecture, photography, film making, poetry, Shakespeare, science fiction, "
        "mythology, philosophy, ethics, stoicism, happiness, childhood, ageing, family dinners, "
        "winter, autumn leaves, the sea, a lost city, a haunted house, a clever fox, "
        "dragons, time travel, a lonely robot, a small village, an old library, bees, whales"
    ),
    "form": _words(
        "short story, poem, haiku, limerick, blog post, email, speech, dialogue, song, essay, "
        "product description, news article, letter, diary entry, movie review, summary, "
        "lesson plan, list of ideas, press release, tweet, cover letter, fairy tale, joke, "
        "monologue, scene for a play, five-paragraph essay, checklist, FAQ, riddle, toast"
    ),
    "audience": _words(
        "a five-year-old child, a high school student, a beginner, my grandmother, an expert, "
        "a busy manager, a new employee, a group of tourists, a software engineer, a farmer, "
        "a college freshman, a sceptical friend, a patient, an investor, a teacher"
    ),
    "tone": _words(
        "funny, serious, friendly, formal, poetic, optimistic, dramatic, concise, persuasive, "
        "neutral, warm, sarcastic, professional, simple, enthusiastic"
    ),
    "role": _words(
        "a travel guide, a doctor, a pirate, a history teacher, a chef, a lawyer, a life coach, "
        "a physicist, a detective, a stand-up comedian, a personal trainer, a gardener, "
        "a software architect, a wise old wizard, an economist, a journalist, a museum curator"
    ),
    "place": _words(
        "Hawaii, Japan, Paris, Rome, New York, Iceland, Kenya, Brazil, India, Norway, Egypt, "
        "Canada, Peru, Greece, Morocco, Thailand, Scotland, Vietnam, Mexico, Australia"
    ),
    "technology": _words(
        "Python, JavaScript, Docker, Kubernetes, React, PostgreSQL, Git, Linux, TensorFlow, "
        "PyTorch, Rust, Go, Java, C++, SQL, Redis, AWS, TypeScript, HTML and CSS, Bash, Excel"
    ),
    "verb": _words(
        "find, count, remove, sort, reverse, sum, filter, merge, group, check, split, rotate, "
        "return, compute, print, validate, replace, convert, extract, compare, multiply"
    ),
    "object": _words(
        "the even numbers in a list, the vowels in a string, the duplicates in a list, "
        "the words of a sentence, the prime numbers below n, the keys of a dictionary, "
        "the largest element of a list, the digits of an integer, the rows of a matrix, "
        "the characters of a string, two sorted lists, the leaves of a binary tree, "
        "the elements of a tuple, the most common word in a text, the divisors of a number, "
        "a list of tuples by the second element, the longest common prefix of strings, "
        "the nodes of a linked list, the palindromes in a list, the missing number in a range, "
        "an IP address, a date string, a Roman numeral, nested lists, the perfect squares, "
        "the substrings of a string, the consecutive numbers in a list, the odd positions, "
        "the negative values in an array, an email address, a hexadecimal number, a CSV line, "
        "the maximum subarray, the anagrams in a list, overlapping intervals, a bank balance"
    ),
    "constraint": _words(
        "using recursion, without using built-in functions, in linear time, "
        "using a list comprehension, using a regular expression, using a lambda function, "
        "and handle empty input, and add a docstring, with type hints, and write tests for it, "
        "using a dictionary, using a stack, using a heap, in one line, and explain how it works, "
        "using dynamic programming, using a loop, and return a tuple, and raise ValueError"
    ),
    "function": _words(
        "count_items, find_max, remove_duplicates, is_valid, merge_lists, sum_digits, "
        "reverse_words, get_primes, sort_by_key, flatten, rotate_left, is_palindrome, "
        "longest_word, common_elements, to_binary, parse_line, group_by_length, max_difference, "
        "running_total, closest_pair, encode_text, fibonacci, factorial, first_unique, median"
    ),
    "arguments": [
        "numbers: List[int]",
        "s: str",
        "n: int",
        "a: int, b: int",
        "words: List[str]",
        "matrix: List[List[int]]",
        "text: str, k: int",
        "xs: list, target: int",
        "d: dict",
    ],
    "returns": ["int", "bool", "str", "List[int]", "float", "List[str]", "dict"],
    "name": _words(
        "Anna, Ben, Carla, David, Emma, Frank, Grace, Henry, Isla, Jack, Karen, Leo, Maria, "
        "Nina, Oscar, Paula, Quinn, Rosa, Sam, Tina, Victor, Wendy, Yusuf, Zoe"
    ),
    "thing": _words(
        "apples, pencils, marbles, books, cookies, stickers, tickets, flowers, coins, stamps, "
        "bottles, chairs, shirts, eggs, oranges, toy cars, cupcakes, balloons, bricks, cards"
    ),
    "n": [str(i) for i in range(2, 100)],
    "m": [str(i) for i in range(2, 13)],
    "price": [str(i) for i in (2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 25, 30, 40, 50)],
    "percent": [str(i) for i in (5, 10, 15, 20, 25, 30, 40, 50, 60, 75)],
}

CHAT = [
    "Write a {form} about {topic}.",
    "Write a {tone} {form} about {topic}.",
    "Write a {tone} {form} about {topic} for {audience}.",
    "Explain {topic} to {audience}.",
    "What are the pros and cons of {topic}?",
    "Give me {m} tips about {topic}.",
    "What is the history of {topic}? Answer in {m} sentences.",
    "Compare {topic} and {topic}.",
    "You are {role}. Tell me about {topic}.",
    "Act as {role} and answer: what should {audience} know about {topic}?",
    "How does {topic} affect {topic}?",
    "Compose an engaging travel blog post about a recent trip to {place}.",
    "Plan a {m}-day trip to {place} for {audience}.",
    "List {m} interesting facts about {topic} and explain each of them.",
    "What are the main arguments for and against {topic}?",
    "Create a {form} in which {role} meets {role} in {place}.",
    "How do I get started with {technology}? Give me a step by step guide.",
    "What is the difference between {technology} and {technology}?",
    "Write an outline for a talk about {topic} with {m} sections.",
    "Draft a {tone} email to {name} about {topic}.",
    "Help me prepare a presentation on {topic} for {audience}.",
    "Why is {topic} important? Give examples.",
    "Suggest {m} creative names for a company that works on {topic}.",
    "Describe a day in the life of {role} in {place}.",
    "Write a dialogue between {name} and {name} about {topic}.",
    "Imagine you are {role}. Write a {form} about {topic} in a {tone} style.",
    "Create a table that compares {topic}, {topic} and {topic}.",
    "My friend {name} says that {topic} is overrated. How should I answer?",
    "Design a {m}-week learning plan for {technology}.",
    "Write a {technology} tutorial about {topic} for {audience}.",
    "What would happen if {topic} disappeared tomorrow?",
    "Give a short overview of {topic}, then ask me {m} quiz questions.",
    "How can {role} use {technology} to learn about {topic}?",
    "Recommend {m} books about {topic} and say why.",
    "Summarize what is known about {topic} in {m} bullet points.",
]
REWRITE = [
    "Rewrite the following text in a {tone} tone:",
    "Summarize the following in {m} sentences:",
    "Translate the following into French:",
    "Explain the following request to {audience}:",
    "Correct the grammar of the following text:",
    "Answer as {role}:",
    "List the key points of this message:",
    "Answer briefly:",
]
MATH = [
    "{name} has {n} {thing}. {name} gives {m} of them to each of {m} friends. How many {thing} "
    "are left?",
    "A shop sells {thing} for ${price} each. {name} buys {n} {thing} and pays with a ${n}00 bill. "
    "How much change does {name} get?",
    "{name} reads {n} pages a day for {m} weeks. {name} reads {m} times as many. How many pages "
    "do they read in total?",
    "A train travels {n} miles per hour for {m} hours and then {n} miles per hour for {m} hours. "
    "What is its average speed?",
    "The price of {n} {thing} is ${n}. After a {percent}% discount, what does one cost?",
    "{name} earns ${price} an hour and works {m} hours a day, {m} days a week. {percent}% goes to "
    "taxes. How much is left after {m} weeks?",
    "What is the sum of the first {n} positive multiples of {m}?",
    "Solve for $x$: ${m}x + {n} = {n}x - {m}$.",
    "Find the greatest common divisor of {n}{n} and {n}{m}.",
    "A rectangle has a length of {n} and a width of {m}. What is the length of its diagonal?",
    "How many ways are there to choose {m} {thing} from {n} {thing}?",
    "Compute ${n} \\cdot {n} - {m}^2 + \\frac{{n}}{{m}}$.",
    "If $f(x) = {m}x^2 - {n}x + {m}$, what is $f({m})$?",
    "{name} is {m} times as old as {name}. In {m} years the sum of their ages will be {n}. How "
    "old is {name} now?",
    "A tank is filled at {n} liters a minute and leaks {m} liters a minute. How long does it take "
    "to fill {n}00 liters?",
    "A bag has {n} red {thing} and {n} blue {thing}. What is the probability of drawing two red "
    "ones without replacement?",
]
CODE = [
    "Write a function to {verb} {object}.",
    "Write a python function to {verb} {object}.",
    "Write a function to {verb} {object} {constraint}.",
    "Write a Python program that reads {object} from a file and {constraint}.",
    "Write a solution to the following problem and make sure that it passes the tests:\n"
    "```python\nfrom typing import List\n\n\ndef {function}({arguments}) -> {returns}:\n"
    '    """ {verb} {object}.\n    """\n\n```',
    "Write a solution to the following problem and make sure that it passes the tests:\n"
    "```python\n\n\ndef {function}({arguments}):\n"
    '    """\n    Write a function to {verb} {object} {constraint}.\n    """\n\n```',
    "Implement a class in Python that can {verb} {object} and {verb} {object}.",
    "Fix and improve this function so that it can {verb} {object}:\n```python\n"
    "def {function}({arguments}):\n    pass\n```",
]


def fill(template: str, rng: random.Random) -> str:
    """Replace every slot by a random word of its list."""
    return _SLOT.sub(lambda match: rng.choice(WORDS[match.group(1)]), template)
