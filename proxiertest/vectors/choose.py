"""Chooses endpoints by the rules of Kubernetes, and compares the choice with the vectors.

python3 choose.py v1.json. It is an example of a runner: put your own program's choice in the place of choose().
"""
import json
import sys


def endpoints(slices, port, family):
    """Yields the address, endpoint and conditions of each endpoint of a port."""
    seen = set()
    for s in slices:
        numbers = [p["port"] for p in s.get("ports") or [] if p.get("name") == port["name"] and p["protocol"] == port["protocol"]]
        for e in (s.get("endpoints") or []) if s["addressType"] == family else []:
            for number in numbers:
                address = ("[%s]:%d" if family == "IPv6" else "%s:%d") % (e["addresses"][0], number)
                if address not in seen:
                    seen.add(address)
                    c = e.get("conditions", {})
                    ready = c.get("ready", True)
                    yield address, e, ready, c.get("serving", ready), c.get("terminating", False)


def hinted(ready, kind, name):
    """The endpoints with a hint for name, if every ready endpoint has hints of this kind; None if there are none."""
    hints = [[h["name"] for h in (e.get("hints") or {}).get(kind, [])] for _, e, *_ in ready]
    return ready and name and all(hints) and [x for x, names in zip(ready, hints) if name in names] or None


def choose(everything, node, local):
    """Returns the action, the endpoints and the reason for each other one."""
    usable = [x for x in everything if x[2] or x[3] and x[4]]
    candidates = [x for x in everything if not local or x[1].get("nodeName") == node["name"]]
    ready = [x for x in candidates if x[2]]
    chosen, reason = ready, ""
    if not ready:
        chosen = [x for x in candidates if x[3] and x[4]]
    elif not local:
        for kind, name, why in ("forNodes", node["name"], "node-hint"), ("forZones", node.get("zone"), "zone-hint"):
            some = hinted(ready, kind, name)
            if some:
                chosen, reason = some, why
                break
    left = {}
    for x in everything:
        if x not in chosen:
            address, _, is_ready, _, terminating = x
            left[address] = ("not-serving" if x not in usable and terminating else "not-ready" if x not in usable
                             else "elsewhere" if x not in candidates else reason if is_ready else "draining")
    action = "forward" if chosen else "drop" if local and usable else "reject"
    return action, sorted(x[0] for x in chosen), left


def main(path):
    wrong, checks = 0, 0
    vectors = json.load(open(path))
    nodes = {n["name"]: n for n in vectors["nodes"]}
    for v in vectors["vectors"]:
        spec = v["service"]["spec"]
        for want in v["want"]:
            everything = list(endpoints(v["endpointSlices"], {"name": want["port"], "protocol": want["protocol"]}, want["family"]))
            for traffic in "internal", "external":
                got = choose(everything, nodes[want["node"]], spec.get(traffic + "TrafficPolicy") == "Local")
                checks += 1
                if got != (want[traffic]["action"], want[traffic].get("endpoints", []), want[traffic].get("leftOut", {})):
                    wrong += 1
                    print("%s: node %s, port %s of %s, %s: got %s, want %s" % (v["name"], want["node"], want["port"], want["family"], traffic, got, want[traffic]))
    print("%d of %d checks are wrong" % (wrong, checks))
    return wrong > 0


sys.exit(main(sys.argv[1]))
