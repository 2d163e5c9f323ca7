package main

import (
	"bytes"
	"context"
	"io/fs"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"
	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"
	extensions "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/controller-runtime/pkg/client"
	gw "sigs.k8s.io/gateway-api/apis/v1"
	"sigs.k8s.io/gateway-api/conformance"
	"sigs.k8s.io/gateway-api/conformance/tests"
	"sigs.k8s.io/gateway-api/conformance/utils/suite"

	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/proxier"
)

// conformanceTests are the tests of the Gateway API that TestConformance runs: of
// TCPRoutes and UDPRoutes, but for UDPRouteNotAllowedByListeners, which does nothing without
// TLSRoutes, and of Gateways and GatewayClasses, as far as they do not ask for HTTPRoutes.
//
// Two changes are made to the manifests. The base has no Gateways of HTTP, since Setup waits
// until all are accepted. Where a test needs any listener, or one that is not of TCP, and has one
// of HTTP, that becomes one of TCP, or of UDP.
//
// GatewayInvalidRouteKind, GatewayListenerUnsupportedProtocol, GatewayStaticAddresses and
// GatewayModifyListeners expect HTTPRoute among supportedKinds; TestPlans and
// TestRoutesAttachAndDetach have what they prove. The others are about HTTP and TLS.
func conformanceTests() []string {
	return []string{
		"GatewayClassObservedGenerationBump", "GatewayObservedGenerationBump", "GatewayOptionalAddressValue",
		"TCPRouteInvalidBackendRefNonexistent", "TCPRouteInvalidCrossNamespaceBackendRef", "TCPRouteInvalidNonTCPListener", "TCPRouteMultipleRoutesAttachment",
		"TCPRouteParentRefAttachAll", "TCPRouteParentRefPortAndSectionName", "TCPRouteReferenceGrant", "TCPRouteWeightedRouting",
		"UDPRoute", "UDPRouteInvalidBackendRefNonexistent", "UDPRouteInvalidCrossNamespaceBackendRef", "UDPRouteMultipleRoutesAttachment",
		"UDPRouteParentRefAttachAllListeners", "UDPRouteParentRefPortAndSectionName", "UDPRouteReferenceGrant", "UDPRouteWeightedRouting",
	}
}

// conformanceFamily is the environment variable that makes a process the one that runs the tests.
const conformanceFamily = "GATEWAY_CONFORMANCE_FAMILY"

// TestConformance runs tests of the Gateway API with the program, real CRDs and real packets,
// over both IP families. They open connections in the process itself, so that this is a
// process of its own in a network namespace of its own, which is node, clients and pods.
func TestConformance(t *testing.T) {
	netnstest.New(t) // skips the test where there are no namespaces
	for _, family := range families() {
		t.Run(string(family), func(t *testing.T) {
			t.Parallel()
			process := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestConformanceInNamespace$", "-test.v")
			process.Env = append(os.Environ(), conformanceFamily+"="+string(family))
			process.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNET}
			output, err := process.CombinedOutput()
			if err != nil {
				t.Fatalf("%v\n%s", err, output)
			}
			for _, name := range conformanceTests() {
				if !bytes.Contains(output, []byte("--- PASS: TestConformanceInNamespace/"+name+" ")) {
					t.Errorf("%s did not run\n%s", name, output)
				}
			}
		})
	}
}

// TestConformanceInNamespace is the process of TestConformance.
func TestConformanceInNamespace(t *testing.T) {
	family := v1.IPFamily(os.Getenv(conformanceFamily))
	if family == "" {
		return
	}
	n := &node{t: t}
	pool := n.setUp(family)
	c := n.newCluster()
	c.apply(gatewayGroup + "kind: GatewayClass\nmetadata: {name: test}\nspec: {controllerName: " + string(testController) + "}")
	refusing, release, err := reserve(pool)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
	var running sync.WaitGroup
	running.Go(func() {
		if err := run(ctx, c.config, settings{controller: testController, pool: pool, refusing: refusing}, proxier.Config{}, zap.NewNop()); err != nil {
			t.Errorf("run: %v", err)
		}
	})
	defer func() {
		stop()
		running.Wait()
		release()
	}()
	options := c.suiteOptions()
	poll.Until(t, "the GatewayClass says what it supports", func() bool {
		class := &gw.GatewayClass{}
		c.read("", "test", class, "GatewayClass")
		return len(class.Status.SupportedFeatures) > 0
	})
	all, err := suite.NewConformanceTestSuite(options)
	if err != nil {
		t.Fatal(err)
	}
	wanted := slices.DeleteFunc(slices.Clone(tests.ConformanceTests), func(test suite.ConformanceTest) bool {
		return !slices.Contains(conformanceTests(), test.ShortName)
	})
	all.Setup(t, wanted)
	if err := all.Run(t, wanted); err != nil {
		t.Fatal(err)
	}
}

// setUp gives the namespace addresses and the pool a route.
func (n *node) setUp(family v1.IPFamily) (pool []netip.Prefix) {
	n.t.Helper()
	lo, err := netlink.LinkByName("lo")
	if err == nil {
		err = netlink.LinkSetUp(lo)
	}
	if err != nil {
		n.t.Fatal(err)
	}
	n.lo = lo
	n.addAddr("192.0.2.10/32")
	n.addAddr("2001:db8:2::10/128")
	prefixes := map[v1.IPFamily]string{v1.IPv4Protocol: "198.19.0.0/24", v1.IPv6Protocol: "2001:db8:19::/64"}
	pool, err = parsePool(prefixes[family])
	if err != nil {
		n.t.Fatal(err)
	}
	destination, err := netlink.ParseIPNet(prefixes[family])
	if err == nil {
		err = netlink.RouteAdd(&netlink.Route{LinkIndex: lo.Attrs().Index, Dst: destination})
	}
	if err != nil {
		n.t.Fatal(err)
	}
	return pool
}

// suiteOptions are those of the Gateway API's tests, with clients that need no discovery.
func (c *cluster) suiteOptions() suite.ConformanceOptions {
	c.tb.Helper()
	types := runtime.NewScheme()
	mapper := meta.NewDefaultRESTMapper(nil)
	for _, add := range []func(*runtime.Scheme) error{scheme.AddToScheme, gw.Install, extensions.AddToScheme} {
		if err := add(types); err != nil {
			c.tb.Fatal(err)
		}
	}
	for _, r := range conformanceResources() {
		mapper.AddSpecific(r.GroupVersionKind, r.GroupVersion().WithResource(r.Name), r.GroupVersion().WithResource(r.Name), scopeOf(r.Kind))
	}
	for _, r := range crds(c.tb) {
		mapper.AddSpecific(r.GroupVersionKind, r.GroupVersion().WithResource(r.Name), r.GroupVersion().WithResource(r.Name), scopeOf(r.Kind))
	}
	options := suite.ConformanceOptions{RestConfig: c.config, ClientOptions: client.Options{Scheme: types, Mapper: mapper}, ManifestFS: []fs.FS{manifests{}}}
	options.GatewayClassName, options.CleanupTestResources, options.DisableParallelTests = "test", true, true
	var err error
	if options.Client, err = client.New(c.config, options.ClientOptions); err == nil {
		options.Clientset, err = kubernetes.NewForConfig(c.config)
	}
	if err != nil {
		c.tb.Fatal(err)
	}
	return options // the suite reads from the GatewayClass's status which features there are
}

func scopeOf(kind string) meta.RESTScope {
	if slices.Contains([]string{"Namespace", "GatewayClass", "CustomResourceDefinition"}, kind) {
		return meta.RESTScopeRoot
	}
	return meta.RESTScopeNamespace
}

// manifests are those of the Gateway API; see conformanceTests.
type manifests struct{}

func (manifests) Open(name string) (fs.File, error) { return conformance.Manifests.Open(name) }

func (manifests) ReadFile(name string) ([]byte, error) {
	file, err := conformance.Manifests.ReadFile(name)
	text := string(file)
	switch name {
	case "base/manifests.yaml":
		documents := slices.DeleteFunc(strings.Split(text, "\n---\n"), func(d string) bool { return strings.Contains(d, "kind: Gateway\n") })
		text = strings.Join(documents, "\n---\n")
	case "tests/tcproute-invalid-non-tcp-listener.yaml":
		text = strings.ReplaceAll(text, "HTTP", "UDP")
	case "tests/gateway-observed-generation-bump.yaml", "tests/gateway-optional-address-value.yaml":
		// A listener of HTTP at port 80 is added later.
		text = strings.NewReplacer("HTTP", "TCP", "port: 80\n", "port: 81\n", "      hostname: \"bar.com\"\n", "").Replace(text)
	}
	return []byte(text), err
}
