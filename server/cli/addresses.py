"""Which addresses a listening socket can be reached at, and by whom."""

import ipaddress
import socket

_ELSEWHERE = {socket.AF_INET: ("192.0.2.1", 9), socket.AF_INET6: ("2001:db8::1", 9)}
"""Addresses of documentation (RFC 5737, RFC 3849): choosing a way to them sends nothing."""


def is_for_this_machine(address: str) -> bool:
    """Returns whether only programs on this machine reach an address, given as numbers."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def is_any(address: str) -> bool:
    """Returns whether an address, given as numbers, stands for all of the machine's."""
    return ipaddress.ip_address(address.partition("%")[0]).is_unspecified


def urls(address: str, port: int) -> list[str]:
    """Returns the base addresses at which a socket bound to `address` is reached, the one for this machine first."""
    if not is_any(address):
        return [_url(address, port)]
    return [_url(host, port) for host in ("127.0.0.1", *_own_addresses(is_ipv6=":" in address))]


def _own_addresses(*, is_ipv6: bool) -> list[str]:
    """Returns the addresses of this machine in its networks: of its main way out and of its name."""
    families = (socket.AF_INET, socket.AF_INET6) if is_ipv6 else (socket.AF_INET,)
    found = [address for family in families if (address := _way_out(family)) is not None]
    try:
        named = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        named = []
    found += [str(entry[4][0]) for entry in named if entry[0] in families]
    return [address for address in dict.fromkeys(found) if _is_reachable(address)]


def _way_out(family: socket.AddressFamily) -> str | None:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as way:
            way.connect(_ELSEWHERE[family])
            return str(way.getsockname()[0])
    except OSError:
        return None


def _is_reachable(address: str) -> bool:
    found = ipaddress.ip_address(address.partition("%")[0])
    return not (found.is_loopback or found.is_unspecified or found.is_link_local)


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
