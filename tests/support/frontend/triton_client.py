"""Triton's own client, in a separate process, because this client registers the same protobuf names as Fleet's generated code.

The process reads one JSON object per line, ``{"do": NAME, "address": …, …}``, performs it, and answers with one line.
"""

import json
import queue
import subprocess
import sys
import threading

import numpy as np

SECONDS = 60


class TritonClient:
    """Starts the client process, and sends it commands."""

    def __init__(self):
        command = [sys.executable, "-m", "tests.support.frontend.triton_client"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, do, address, **arguments):
        """Send a command and return the answer of the process. Call it in a thread if this process runs the server."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": do, "address": address, **arguments}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the client ended with {self._process.wait(60)}"
        return json.loads(line)

    def close(self):
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(SECONDS)


def main():
    import tritonclient.grpc as triton  # here, because the tests' own process must not import it

    tasks = {
        each.__name__: each
        for each in (describe, infer, infer_until_cancelled, protocol, stream, stream_until_cancelled)
    }
    for line in sys.stdin:
        arguments = json.loads(line)
        do, address = tasks[arguments.pop("do")], arguments.pop("address")
        with triton.InferenceServerClient(address) as client:
            try:
                answer = do(triton, client, **arguments)
            except triton.InferenceServerException as error:
                answer = {"error": error.message(), "status": error.status()}
        print(json.dumps(answer), flush=True)


def describe(triton, client, model):
    return {
        "live": client.is_server_live(),
        "ready": client.is_server_ready(),
        "model_ready": client.is_model_ready(model),
        "other_ready": client.is_model_ready("other"),
        "server": client.get_server_metadata(as_json=True),
        "model": client.get_model_metadata(model, as_json=True),
    }


def protocol(triton, client):
    return described_protocol(triton.service_pb2.DESCRIPTOR)


def described_protocol(file):
    """Return by message its fields, and by method whether client and server stream."""
    described = {}
    todo = list(file.message_types_by_name.values())
    for message in todo:
        described[message.full_name] = {
            field.name: [field.number, field.type, field.is_repeated, field.containing_oneof is not None]
            for field in message.fields
        }
        todo.extend(message.nested_types)
    for method in file.services_by_name["GRPCInferenceService"].methods:
        described[method.full_name] = [method.client_streaming, method.server_streaming]
    return described


def infer(triton, client, **request):
    return shown(client.infer(**asked(triton, **request)))


def infer_until_cancelled(triton, client, **request):
    """Send a request, and cancel it when the test writes a line, which means that the server has begun with the request."""
    errors = queue.Queue()
    call = client.async_infer(callback=lambda result, error: errors.put(error), **asked(triton, **request))
    sys.stdin.readline()
    call.cancel()
    return {"error": errors.get(timeout=SECONDS).message()}


def stream(triton, client, requests, headers=None):
    """Send all requests at once; return the responses in the order of arrival once every request has ended."""
    responses = []
    ended = threading.Semaphore(0)

    def heard(result, error):
        response = {"error": error.message()} if error else shown(result)
        responses.append(response)
        if error or response["parameters"]["triton_final_response"]:
            ended.release()

    client.start_stream(heard, headers=headers)
    for request in requests:
        client.async_stream_infer(**asked(triton, **request))
    for _ in requests:
        if not ended.acquire(timeout=SECONDS):
            client.stop_stream(cancel_requests=True)
            raise TimeoutError(f"only {responses}")
    client.stop_stream()
    return responses


def stream_until_cancelled(triton, client, **request):
    """Send a request on a stream, and cancel the stream at its first response."""
    responses = queue.Queue()
    client.start_stream(lambda result, error: responses.put((result, error)))
    client.async_stream_infer(**asked(triton, **request))
    result, error = responses.get(timeout=SECONDS)
    assert error is None, error
    client.stop_stream(cancel_requests=True)
    return shown(result)


def asked(triton, *, text=None, ids=None, streaming=None, sampling=None, outputs=None, datatype="INT32", **options):
    """Return the arguments for the client's methods that send a request."""
    inputs = []

    def add(name, kind, array):
        tensor = triton.InferInput(name, list(array.shape), kind)
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)

    if text is not None:
        add("text_input", "BYTES", np.array([text.encode()], dtype=np.object_))
    if ids is not None:
        add("input_ids", datatype, np.array(ids, {"INT32": np.int32, "INT64": np.int64, "UINT32": np.uint32}[datatype]))
    if streaming is not None:
        add("stream", "BOOL", np.array([streaming]))
    if sampling is not None:
        add("sampling_parameters", "BYTES", np.array([json.dumps(sampling).encode()], dtype=np.object_))
    wanted = outputs and [triton.InferRequestedOutput(name) for name in outputs]
    return {"model_name": "tiny", "inputs": inputs, "outputs": wanted, **options}


def shown(result):
    """Return a response as JSON."""
    response = result.get_response()
    outputs = {}
    for output in response.outputs:
        array = result.as_numpy(output.name)
        assert list(array.shape) == list(output.shape)
        outputs[output.name] = [each.decode() if isinstance(each, bytes) else each for each in array.flatten().tolist()]
    parameters = {
        name: getattr(each, each.WhichOneof("parameter_choice")) for name, each in response.parameters.items()
    }
    return {"id": response.id, "model": response.model_name, "parameters": parameters, **outputs}


if __name__ == "__main__":
    main()
