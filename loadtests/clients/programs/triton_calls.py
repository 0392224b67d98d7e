"""Calls of Triton's client: python triton_calls.py ADDRESS MODEL MODEL_FOLDER SCRATCH, in the client's environment."""

import queue
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from reporting import report_calls

SECONDS = 60.0
TEXT = "Once upon a time"


def main(address: str, model: str) -> None:
    with triton.InferenceServerClient(address) as client:
        report_calls(calls(client, model))


def text_input() -> Any:
    tensor = triton.InferInput("text_input", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([TEXT.encode()], dtype=np.object_))
    return tensor


def streaming() -> Any:
    tensor = triton.InferInput("stream", [1], "BOOL")
    tensor.set_data_from_numpy(np.array([True]))
    return tensor


def calls(client: Any, model: str) -> dict[str, Callable[[], object]]:
    given = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}

    def infer() -> str:
        answer = client.infer(model, [text_input()], parameters=given, client_timeout=SECONDS)
        return str(answer.as_numpy("text_output").item(0).decode())

    def streams() -> bool:
        received: queue.Queue[Any] = queue.Queue()
        client.start_stream(callback=lambda result, error: received.put((result, error)))
        parts: list[str] = []
        client.async_stream_infer(model, [text_input(), streaming()], parameters=given)
        while True:
            result, error = received.get(timeout=SECONDS)
            if error is not None:
                raise error
            response = result.get_response()
            if (output := result.as_numpy("text_output")) is not None and output.size:
                parts.append(output.item(0).decode())
            if response.parameters["triton_final_response"].bool_param:
                break
        client.stop_stream()
        return len(parts) > 1 and "".join(parts) == infer()

    def refuses_an_unknown_model() -> bool:
        try:
            client.infer(f"{model}-of-nobody", [text_input()], parameters=given)
        except triton.InferenceServerException as error:
            return bool(error.status() == "StatusCode.NOT_FOUND")
        return False

    return {
        "live and ready": lambda: client.is_server_live() and client.is_server_ready() and client.is_model_ready(model),
        "metadata": lambda: "text_output" in [each.name for each in client.get_model_metadata(model).outputs],
        "infer": infer,
        "stream": streams,
        "unknown model": refuses_an_unknown_model,
    }


if __name__ == "__main__":
    main(*sys.argv[1:3])
