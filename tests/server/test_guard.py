"""API keys: deny by default."""

from __future__ import annotations

import openai
import pytest

from tests.server.conftest import RunningServer

KEYS = ("first-key", "second-key")


def routes(server: RunningServer) -> list[tuple[str, str]]:
    found = [(m, r.path) for r in server.app.routes for m in r.methods]
    assert len(found) >= 10
    return found


def test_every_route_but_health_wants_a_key(start):
    server = start(api_keys=KEYS)
    for method, path in [
        *routes(server),
        ("GET", "/nothing"),
        ("POST", "/health/"),
        ("GET", "/docs"),
        ("OPTIONS", "/v1/models"),
    ]:
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "first-key"},
            {"authorization": "Bearer"},
        ):
            response = server.request(method, path, headers=headers)
            if path == "/health":
                assert response.status_code == 200
                continue
            assert response.status_code == 401, (method, path, headers)
            if method != "HEAD":
                assert response.json()["error"]["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"


def test_either_key_opens_the_door(start):
    server = start(api_keys=KEYS)
    for key in KEYS:
        assert [m.id for m in server.client(api_key=key).models.list()] == ["fake-model"]
    with pytest.raises(openai.AuthenticationError):
        server.client(api_key="third-key").models.list()


def test_keys_are_tenants_and_share_no_prefixes(start):
    server = start(api_keys=KEYS)
    for key in (*KEYS, KEYS[0]):
        server.client(api_key=key).completions.create(model="fake-model", prompt="x")
    first, second, again = server.engine.requests
    assert first.cache_salt == first.tenant == again.cache_salt
    assert first.cache_salt not in ("", second.cache_salt)
    assert "first-key" not in first.tenant


def test_without_keys_everything_is_open(shared: RunningServer):
    assert shared.get("/v1/models").status_code == 200


def test_pages_of_other_sites_stay_out(start):
    server = start()
    body = {"prompt": "x", "max_tokens": 1}
    for origin in ("https://evil.example", "null", f"http://127.0.0.1:{server.port + 1}"):
        # A form of such a page needs no preflight.
        response = server.post("/v1/completions", json=body, headers={"origin": origin})
        assert response.status_code == 403
        assert response.json()["error"]["code"] == "origin_not_allowed"
        assert server.request("OPTIONS", "/v1/completions", headers={"origin": origin}).status_code == 403
    assert server.post("/v1/completions", json=body).status_code == 200
    assert server.post("/v1/completions", json=body, headers={"origin": server.url}).status_code == 200


def test_pages_of_a_named_site_may_ask(start):
    server = start(origins=("https://good.example",), api_keys=KEYS)
    preflight = {"origin": "https://good.example", "access-control-request-method": "POST"}
    response = server.request("OPTIONS", "/v1/completions", headers=preflight)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == "https://good.example"
    headers = {"origin": "https://good.example", "authorization": f"Bearer {KEYS[0]}"}
    response = server.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers=headers)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == "https://good.example"
    other = headers | {"origin": "https://other.example"}
    assert server.post("/v1/completions", json={"prompt": "x"}, headers=other).status_code == 403
