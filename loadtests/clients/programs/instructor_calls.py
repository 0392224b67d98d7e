"""Calls of instructor, which parses answers into objects: python instructor_calls.py URL MODEL MODEL_FOLDER SCRATCH.

The script runs in the environment of instructor.
"""

import sys

import instructor
import openai
from pydantic import BaseModel
from reporting import report


class City(BaseModel):
    """The object that an answer is parsed into."""

    population: int


def main(url: str, model: str) -> None:
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS):
        try:
            answer = instructor.from_openai(client, mode=mode).chat.completions.create(
                model=model,
                response_model=City,
                messages=[{"role": "user", "content": "Invent a city."}],
                max_tokens=200,
                temperature=0,
                max_retries=0,
            )
            ok, why = isinstance(answer.population, int), ""
        except Exception as error:  # noqa: BLE001 - supervisor: the other mode goes on
            ok, why = False, f"{type(error).__name__}: {error}"[:300]
        report(mode.name.lower(), ok=ok, why=why)


if __name__ == "__main__":
    main(*sys.argv[1:3])
