//go:build unix

package debughttp_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/node/debughttp"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// evil is a name that the API server would reject; the trackers do not.
const evil = `<img src=x onerror="window.injected=1"><script>window.injected=1</script>`

// busyProxy returns a proxy with some Services, one of them with evil names.
func busyProxy(t *testing.T) *proxy {
	t.Helper()
	p := newProxy(t)
	p.OnServiceAdd(webService())
	p.OnEndpointSliceAdd(webSlice())
	p.OnEndpointSliceAdd(webSlice6())
	for i, name := range []string{"cart", "checkout", "orders", "payments", "search"} {
		p.OnServiceAdd(proxiertest.Service("shop", name, proxiertest.ClusterIPs(fmt.Sprintf("10.96.1.%d", i+1)),
			proxiertest.Port("grpc", v1.ProtocolTCP, 9000)))
		options := []proxiertest.SliceOption{proxiertest.SlicePort("grpc", v1.ProtocolTCP, 9000)}
		for n := range i {
			options = append(options, proxiertest.Endpoint(fmt.Sprintf("10.244.%d.%d", i+3, n+1), proxiertest.OnNode("node-2")))
		}
		p.OnEndpointSliceAdd(proxiertest.Slice("shop", name, discovery.AddressTypeIPv4, options...))
	}
	p.OnServiceAdd(proxiertest.Service("kube-system", "dns", proxiertest.ClusterIPs("10.96.0.53"),
		proxiertest.Port("dns", v1.ProtocolUDP, 53), proxiertest.Port("dns-tcp", v1.ProtocolTCP, 53)))
	for i := range 300 {
		p.OnServiceAdd(numberedService(i))
		p.OnEndpointSliceAdd(numberedSlice(i, 5))
	}
	p.run(t)
	p.sync(t)
	return p
}

// rollOut changes the endpoints of Services, in several syncs.
func (p *proxy) rollOut(t *testing.T, syncs int) {
	t.Helper()
	for i := range syncs {
		for n := range 1 + i*i%23 {
			p.OnEndpointSliceUpdate(nil, numberedSlice(n*7%300, i+2))
		}
		p.sync(t)
	}
}

// serve serves a proxy under a prefix, on loopback, until the test or stop ends it.
func serve(t *testing.T, p debughttp.Proxy) (page string, stop func()) {
	t.Helper()
	mux := http.NewServeMux()
	mux.Handle("/debug/serviceplane/", http.StripPrefix("/debug/serviceplane", debughttp.Handler(p)))
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		t.Errorf("the browser asked for %s, which is not under the prefix", r.URL)
		http.NotFound(w, r)
	})
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	return server.URL + "/debug/serviceplane/", func() {
		server.CloseClientConnections()
		server.Close()
	}
}

// checkConsole: Chromium logs every response that is no success, and 501 says that an engine
// lacks something.
func checkConsole(t *testing.T, b *browser) {
	t.Helper()
	for _, line := range b.consoleErrors() {
		if !strings.Contains(line, "status of 501") {
			t.Errorf("the console has an error: %s", line)
		}
	}
}

// All tests of the page share a browser, which takes seconds to start.
func TestPage(t *testing.T) {
	b := startBrowser(t)
	for name, test := range map[string]func(t *testing.T, b *browser){
		"rollout": pageDuringRollout, "filters": pageFiltersServices, "keys": pageFollowsKeys, "thirty thousand": pageScrollsThirtyThousand,
		"copy": pageCopiesCommands, "back": pageGoesBack, "traffic": pageShowsTraffic, "changes": pageShowsChanges, "failed": pageShowsFailures,
		"markup": pageKeepsMarkupAsText, "link": pageIsOneLink, "socket": pageNamesSockets,
		"phone": pageFitsAPhone, "hidden": hiddenPageSendsNothing, "silent": pageShowsThatTheProxyIsSilent, "gone": pageShowsRulesAfterAServiceThatIsGone,
	} {
		t.Run(name, func(t *testing.T) { b.reset(t); test(t, b) })
	}
}

// withRules has rules for Service shop/web alone; the engine of shop/userspace has none.
type withRules struct{ debughttp.Proxy }

func (withRules) Rules(ctx context.Context, name types.NamespacedName) (map[v1.IPFamily]string, error) {
	return (*rulesSource)(nil).Rules(ctx, name)
}

// What the page learns about one Service, as that it is gone or that its engine has no rules, hides
// nothing of others.
func pageShowsRulesAfterAServiceThatIsGone(t *testing.T, b *browser) {
	p, _ := webProxy(t)
	page, _ := serve(t, withRules{p})
	shown := func(when string) {
		t.Helper()
		b.await("the rules are there "+when, "return !document.querySelector('#rules').hidden")
	}
	b.open(page + "#namespace=shop&name=web")
	shown("at first")
	for _, other := range []string{"gone", "userspace"} {
		b.run("location.hash = '#namespace=shop&name=" + other + "'")
		b.awaitText("#service-heading", "shop/"+other)
		b.await("the rules are hidden", "return document.querySelector('#rules').hidden")
		b.await("the page has asked for more", "return performance.getEntriesByType('resource').filter((e) => e.name.includes('rules') && e.name.includes('name="+other+"')).length > 0")
		b.run("location.hash = '#namespace=shop&name=web'")
		b.awaitText("#service-heading", "shop/web")
		shown("after Service " + other)
	}
}

// The verdict of a packet says whether a socket or rules send it there.
func pageNamesSockets(t *testing.T, b *browser) {
	p, _ := webProxy(t)
	for _, c := range []struct {
		source debughttp.Proxy
		says   bool
	}{{p, false}, {bySocket{p}, true}} {
		page, stop := serve(t, c.source)
		b.open(page + "#namespace=shop&name=web")
		b.fill("[name=source]", "203.0.113.7")
		b.fill("[name=destination]", "198.51.100.10:80")
		b.click("#packet button")
		b.awaitText("#verdict", "forward")
		if text := b.text("#verdict"); strings.Contains(text, "by socket") != c.says {
			t.Errorf("the verdict is %q, want by socket: %v", text, c.says)
		}
		stop()
	}
}

// An operator uses the page during a rollout.
func pageDuringRollout(t *testing.T, b *browser) {
	p := busyProxy(t)
	page, _ := serve(t, p)
	b.size(1200, 900)
	b.open(page)
	b.awaitText("#connection", "live")
	b.awaitText("#families", "IPv6")
	b.awaitText("#families .badge", "in sync")
	b.awaitText("#node", "node-1")
	b.awaitText("#notes", "did not set Deps.Conntrack and Deps.Health")
	b.awaitText("#count", "307 Services")

	// Search, and open the result.
	b.run("window.notReloaded = true; document.querySelector('#search').focus()")
	b.typeHere("shop/we")
	b.await("the search finds one Service", "return document.querySelectorAll('#rows [role=row]').length === 1")
	b.awaitText("#count", "1 Service")
	b.awaitText("#rows", "198.51.100.10")
	b.click("#rows a")
	b.awaitText("#service-heading", "shop/web")
	b.awaitText("#ports", "198.51.100.10:80")
	b.awaitText("#ports", "only from 203.0.113.0/24")
	const endpoint = "tr[data-state] td:first-child"
	stateOf := func(address, state string) {
		t.Helper()
		b.await(address+" is "+state, `const cell = [...document.querySelectorAll(arguments[0])].find((e) => e.innerText === arguments[1]);
			return cell?.parentElement.querySelector(".badge")?.innerText === arguments[2]`, endpoint, address, state)
	}
	stateOf("10.244.1.5:8080", "ready")
	stateOf("10.244.2.6:8080", "not ready")

	// The page follows a change, and keeps its state.
	b.run(`document.querySelector("[name=source]").focus();
		window.row = document.querySelector("tr[data-state]");
		document.scrollingElement.scrollTop = 40`)
	p.OnEndpointSliceUpdate(nil, webSlice(proxiertest.Terminating()))
	p.sync(t)
	stateOf("10.244.1.5:8080", "terminating")
	b.await("the page was not reloaded, and kept focus, text, scroll position and nodes", `return window.notReloaded === true &&
		document.activeElement.name === "source" && document.querySelector("#search").value === "shop/we" && document.scrollingElement.scrollTop === 40 &&
		document.querySelector("tr[data-state]") === window.row && window.row.dataset.state === "terminating"`)

	// Explain packets to the load balancer IP.
	b.click("[aria-label='Explain a packet to 198.51.100.10:80/TCP']")
	b.await("the form has the destination and waits for the source", `return document.activeElement.name === "source" &&
		document.querySelector("[name=destination]").value === "198.51.100.10:80"`)
	b.typeHere("192.0.2.99")
	b.click("#packet button")
	b.awaitText("#verdict", "drop")
	b.awaitText("#reasons li", "is not in the source ranges")
	b.fill("[name=source]", "203.0.113.7")
	b.click("#packet button")
	b.awaitText("#verdict", "forward")
	b.awaitText("#reasons li", "no endpoint on this node is ready")
	b.awaitText("#explanation", "on another node")

	// Failed syncs have bars too.
	p.rollOut(t, 12)
	p.engines[v1.IPv4Protocol].Fail(errors.New("netlink receive: no buffer space available"))
	p.OnEndpointSliceUpdate(nil, numberedSlice(1, 1))
	if err := p.Sync(t.Context()); err == nil {
		t.Fatal("Sync = nil, want the failure")
	}
	b.awaitText("#families .badge", "failing")
	b.await("a bar shows the failure", "return document.querySelector('#chart .bar[data-kind=failed]') !== null")
	p.engines[v1.IPv4Protocol].Fail(nil) // the next syncs may be more than a history holds
	p.rollOut(t, 18)
	b.await("no family is failing", "return !document.querySelector('#families').innerText.includes('failing')")
	b.awaitValue("there is one bar for each sync", func() string { return fmt.Sprint(len(p.History())) },
		"return document.querySelectorAll('#chart .bar').length")
	b.awaitText("#sync", "partial sync")
	b.awaitText("#sync", "tracker")
	b.run("document.querySelector('#chart').focus()")
	b.typeHere("\ue012") // arrow to the left
	b.await("the arrow key chooses a sync", "return document.querySelectorAll('#chart [data-chosen]').length === 1")
	checkConsole(t, b)
	b.size(1200, 1000)
	b.run("document.activeElement.blur(); document.scrollingElement.scrollTop = 0")
	b.picture("rollout")
}

// Markup in names is shown as text.
func pageKeepsMarkupAsText(t *testing.T, b *browser) {
	p := busyProxy(t)
	name := changetracker.ServicePortName{NamespacedName: types.NamespacedName{Namespace: evil, Name: evil}, Port: evil, Protocol: v1.ProtocolTCP}
	p.engines[v1.IPv4Protocol].Refuse(name, errors.New(evil))
	p.OnServiceAdd(proxiertest.Service(evil, evil, proxiertest.ClusterIPs("10.96.0.99"), proxiertest.Port(evil, v1.ProtocolTCP, 80),
		proxiertest.ExternalIPs(evil)))
	p.OnEndpointSliceAdd(proxiertest.Slice(evil, evil, discovery.AddressTypeIPv4, proxiertest.SlicePort(evil, v1.ProtocolTCP, 80),
		proxiertest.Endpoint("10.244.9.9", proxiertest.OnNode(evil), proxiertest.InZone(evil))))
	p.sync(t)
	page, _ := serve(t, p)
	b.open(page + "#q=10.96.0.99")
	b.awaitText("#rows", evil)
	b.awaitText("#notes", evil)
	b.awaitText("#namespace", evil)
	b.click("#rows a")
	b.awaitText("#service-heading", evil+"/"+evil)
	b.awaitText("#ports h3", evil)
	b.awaitText("tr[data-state]", evil)
	b.awaitText("#ports .error", evil)
	b.fill("[name=source]", "192.0.2.99")
	b.fill("[name=destination]", "10.96.0.99:80")
	b.click("#packet button")
	b.awaitText("#reasons", evil)
	b.await("nothing was injected", "return window.injected === undefined && document.querySelectorAll('img, body script').length === 0")
	checkConsole(t, b)
}

// The URL holds the search and the opened Service, and the browser's back button leads to
// the previous Service.
func pageIsOneLink(t *testing.T, b *browser) {
	p := busyProxy(t)
	page, _ := serve(t, p)
	b.open(page + "#q=shop&namespace=shop&name=orders")
	b.awaitText("#service-heading", "shop/orders")
	b.awaitText("#ports", "10.244.5.2:9000")
	b.await("the link fills the search", "return document.querySelector('#search').value === 'shop'")
	b.click("#close")
	b.await("the URL has no Service", "return location.hash === '#q=shop' && document.querySelector('#service').hidden")
	b.await("the list is that of the search", "return document.querySelectorAll('#rows [role=row]').length === 6")
	b.click("#rows a")
	b.awaitText("#service-heading", "shop/cart")
	b.awaitText("#ports", "reject")
	b.await("the address follows", "return location.hash === '#q=shop&namespace=shop&name=cart'")
	b.run("history.go(-2)")
	b.awaitText("#ports", "10.244.5.2:9000")
	checkConsole(t, b)
}

// Nothing is wider than a narrow window; there is a dark mode.
func pageFitsAPhone(t *testing.T, b *browser) {
	p := busyProxy(t)
	page, _ := serve(t, p)
	b.size(390, 844)
	b.open(page)
	b.awaitText("#rows", "load/service-00001")
	b.await("the list is as wide as the window, with the verdict and the endpoints in each row", `const row = document.querySelector("#rows .row"), box = row.getBoundingClientRect();
		return document.documentElement.scrollWidth <= 390 && [1, 4].every((i) => {
			const cell = row.children[i].getBoundingClientRect();
			return cell.width > 0 && cell.left >= box.left && cell.right <= box.right && cell.bottom <= box.bottom + 1;
		})`)
	b.picture("phone")
	b.devtools("Emulation.setEmulatedMedia", map[string]any{"features": []map[string]string{{"name": "prefers-color-scheme", "value": "dark"}}})
	b.click("#rows [role=row]:last-child a")
	b.open(page + "#namespace=shop&name=web")
	b.awaitText("#ports", "10.244.1.5:8080")
	b.fill("[name=source]", "203.0.113.7")
	b.fill("[name=destination]", "198.51.100.10:80")
	b.click("#packet button")
	b.awaitText("#verdict", "forward")
	b.await("the page is as wide as the window", "return document.documentElement.scrollWidth <= 390")
	b.await("no table is wider than its box", "return [...document.querySelectorAll('.table')].every((e) => e.scrollWidth <= e.clientWidth)")
	b.await("the ground is dark", "return getComputedStyle(document.body).backgroundColor === 'rgb(20, 22, 26)'")
	b.picture("phone-dark")
	b.size(1280, 860)
	b.run("document.scrollingElement.scrollTop = 0")
	b.picture("dark")
	b.size(390, 844)
	b.await("all that is filled in has a label", `return [...document.querySelectorAll("input, select, button")].filter((e) => e.checkVisibility()).every((e) => e.labels?.length || e.innerText || e.ariaLabel)`)
	checkConsole(t, b)
}

// A hidden page sends no requests, and sends some at once when it is visible again.
func hiddenPageSendsNothing(t *testing.T, b *browser) {
	p := busyProxy(t)
	page, _ := serve(t, p)
	b.open(page)
	b.awaitText("#connection", "live")
	b.run(`const real = window.fetch; window.last = Date.now(); window.fetch = (...all) => { window.last = Date.now(); return real(...all); };
		window.hide = (hidden) => {
			Object.defineProperty(document, "hidden", { configurable: true, value: hidden });
			document.dispatchEvent(new Event("visibilitychange"));
		}`)
	b.run("hide(true)")
	b.await("nothing is asked for three seconds", "return Date.now() - last > 3000")
	b.run("hide(false)")
	b.await("it asks again", "return Date.now() - last < 3000")
	checkConsole(t, b)
}

// The page shows that the proxy does not answer, and tries again.
func pageShowsThatTheProxyIsSilent(t *testing.T, b *browser) {
	p := busyProxy(t)
	page, stop := serve(t, p)
	b.open(page)
	b.awaitText("#connection", "live")
	checkConsole(t, b)
	b.run(`window.asked = 0; const real = window.fetch; window.fetch = (...all) => { window.asked++; return real(...all); }`)
	stop()
	b.awaitText("#connection", "does not answer")
	b.awaitText("#rows", "load") // what was known stays
	b.run("window.asked = 0")
	b.await("it tries again", "return window.asked > 8") // four requests each time
}
