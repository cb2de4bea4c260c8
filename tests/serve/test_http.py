"""The HTTP layer through a bare socket: chunked bodies, Expect, limits, keys."""
import json
import socket

import pytest
from octavo import CAPITAL, CAPITAL_ANSWER, PATIENCE

BODY = json.dumps(dict(messages=[dict(role="user", content=CAPITAL)], temperature=0, max_tokens=20,
                       chat_template_kwargs=dict(enable_thinking=False))).encode()


def connect(server):
    return socket.create_connection(("127.0.0.1", server.port), timeout=30 * PATIENCE)


def receive(sock):
    """(status, headers, body) of one answer with a length."""
    data = b""
    while b"\r\n\r\n" not in data:
        more = sock.recv(65536)
        assert more, f"expected an answer, found the end of the connection after {data!r}"
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    headers = {k.lower(): v for k, v in (l.split(": ", 1) for l in lines[1:])}
    while len(body) < int(headers.get("content-length", 0)):
        more = sock.recv(65536)
        assert more, "expected the whole body, found the end of the connection"
        body += more
    return int(lines[0].split()[1]), headers, body


def exchange(server, data):
    with connect(server) as s:
        s.sendall(data)
        return receive(s)


def post(path="/v1/chat/completions", *headers):
    return b"".join([f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n".encode()] + [h.encode() + b"\r\n" for h in headers]) + b"\r\n"


def chunked(parts, extension=b"", trailers=b""):
    return b"".join(b"%x%s\r\n%s\r\n" % (len(p), extension, p) for p in parts) + b"0\r\n" + trailers + b"\r\n"


def content(answer):
    status, _, body = answer
    assert status == 200, body
    return json.loads(body)["choices"][0]["message"]["content"]


@pytest.mark.smoke
@pytest.mark.parametrize("parts,extension,trailers", [
    ([BODY], b"", b""), ([BODY[i:i + 1] for i in range(len(BODY))], b"", b""), ([BODY[:7], BODY[7:]], b";a=\"b\";c", b""),
    ([BODY], b"", b"X-Checksum: 5\r\n")], ids=["one chunk", "a byte a chunk", "chunk extension", "trailers"])
def test_a_chunked_body_is_read(server, parts, extension, trailers):
    head = post("/v1/chat/completions", "Transfer-Encoding: chunked")
    assert content(exchange(server, head + chunked(parts, extension, trailers))) == CAPITAL_ANSWER


def test_an_empty_chunked_body_is_refused(server):
    assert exchange(server, post("/v1/chat/completions", "Transfer-Encoding: chunked") + chunked([]))[0] == 400


def test_both_length_and_chunked_is_refused(server):
    head = post("/v1/chat/completions", f"Content-Length: {len(BODY)}", "Transfer-Encoding: chunked")
    assert exchange(server, head + chunked([BODY]))[0] == 400


def test_expect_is_answered_before_the_body(server):
    with connect(server) as s:
        s.sendall(post("/v1/chat/completions", f"Content-Length: {len(BODY)}", "Expect: 100-continue"))
        assert s.recv(65536).startswith(b"HTTP/1.1 100 ")
        s.sendall(BODY)
        assert content(receive(s)) == CAPITAL_ANSWER


def test_a_body_over_the_limit_is_refused_before_it_is_sent(server):
    assert exchange(server, post("/v1/chat/completions", f"Content-Length: {1 << 40}", "Expect: 100-continue"))[0] == 413


def test_headers_over_the_limit_are_refused(server):
    assert exchange(server, b"GET /health/live HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 100_000 + b"\r\n\r\n")[0] == 431


@pytest.mark.parametrize("data", [b"\x16\x03\x01\x02\x00\x01\x00", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"POST /v1/models HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
                                  b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n"], ids=repr)
def test_what_is_no_http_is_refused(server, data):
    with connect(server) as s:
        s.sendall(data)
        s.shutdown(socket.SHUT_WR)
        answer = s.recv(65536)
        assert answer == b"" or answer.split()[1] in (b"400", b"505"), answer
    assert server.status("/health/live") == 200


def test_a_connection_is_used_again(server):
    with connect(server) as s:
        for _ in range(3):
            s.sendall(post("/v1/chat/completions", f"Content-Length: {len(BODY)}") + BODY)
            assert content(receive(s)) == CAPITAL_ANSWER


def test_pipelined_requests_are_answered_in_order(server):
    one = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
    with connect(server) as s:
        s.sendall(one + post("/v1/chat/completions", f"Content-Length: {len(BODY)}") + BODY)
        data = b""
        while b"Paris" not in data:
            more = s.recv(65536)
            assert more, f"expected two answers, found {data!r}"
            data += more
    assert data.index(b'"list"') < data.index(b"Paris")


# ---- keys

ROUTES = [("POST", "/v1/chat/completions"), ("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/v1/models/tiny.gguf"), ("GET", "/v1/workers"),
          ("POST", "/tokenize"), ("POST", "/detokenize"), ("POST", "/apply-template"), ("GET", "/metrics"), ("GET", "/version"),
          ("POST", "//v1/chat/completions"), ("POST", "/v1/../v1/chat/completions"), ("POST", "/V1/Chat/Completions"), ("POST", "/v1/chat/completions/"),
          ("POST", "http://x/v1/chat/completions"), ("POST", "/%761/chat/completions"), ("POST", "/health/live/../../v1/chat/completions"),
          ("HEAD", "/v1/models"), ("OPTIONS", "/v1/chat/completions"), ("GET", "/nothing")]


@pytest.fixture(scope="module")
def locked(tmp_path_factory):
    import octavo
    folder = tmp_path_factory.mktemp("locked")
    keys = folder / "keys"
    keys.write_text("# keys\nsecret-one\nsecret-two\n")
    s = octavo.Server(folder, "--api-key-file", keys, tp=1)
    try:
        yield s.wait_ready()
        s.stop()
    finally:
        s.destroy()


@pytest.mark.parametrize("method,target", ROUTES)
@pytest.mark.parametrize("header", [None, "Authorization: Bearer wrong", "Authorization: Bearer ", "Authorization: Basic secret-one", "Authorization: secret-one", "Authorization: Bearer # keys"])
def test_without_a_key_no_route_serves(locked, method, target, header):
    head = f"{method} {target} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(BODY)}\r\nConnection: close\r\n" + (header + "\r\n" if header else "") + "\r\n"
    with connect(locked) as s:
        s.sendall(head.encode() + BODY)
        answer = s.recv(65536)
    # OPTIONS is a browser's question about methods, which carries no key and serves nothing.
    allowed = (b"401", b"403", b"404", b"405") + ((b"204", b"200") if method == "OPTIONS" else ())
    assert answer.split()[1] in allowed, answer[:200]
    assert b"Paris" not in answer and b"tiny" not in answer


@pytest.mark.parametrize("key", ["secret-one", "secret-two"])
def test_each_key_opens(locked, key):
    status, _, text = locked.http("/v1/chat/completions", BODY, headers={"Authorization": f"Bearer {key}"})
    assert status == 200 and CAPITAL_ANSWER in text


def test_health_needs_no_key(locked):
    assert locked.status("/health/live") == 200 and locked.status("/health/ready") == 200


def test_a_refusal_for_want_of_a_key_has_the_error_shape(locked):
    status, headers, text = locked.http("/v1/models")
    assert status == 401 and json.loads(text)["error"]["code"] == "invalid_api_key"
