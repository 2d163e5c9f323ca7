package cluster

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/serviceplane/serviceplane/node/programmed"
)

// NodeOptions say which nodes are asked, and where. The zero value asks all nodes at nodeproxy's
// port.
type NodeOptions struct {
	Policy programmed.NodePolicy
	// Port is where each node answers at /programmed; 0 means 10256, that of nodeproxy's health.
	Port uint16
	// Client asks the nodes; nil means one without a proxy.
	Client *http.Client
}

const (
	// nodesRefresh is how long a list of Nodes is used at least before the next one. In large
	// clusters it is longer, so that a waiter reads at most listedNodes Nodes a second.
	nodesRefresh = 5 * time.Second
	listedNodes  = 200
	// listRetry is the pause after a list that failed.
	listRetry = time.Second
)

// refreshFor returns how long a list of so many Nodes is used.
func refreshFor(nodes int) time.Duration {
	return max(nodesRefresh, time.Duration(nodes)*time.Second/listedNodes)
}

// nodes lists Nodes now and then.
type nodes struct {
	client *Client
	policy programmed.NodePolicy

	mu     sync.Mutex // guards all below
	next   time.Time  // not before it, a new list
	failed error      // of the last list
	names  []string
	addrs  map[string]string // by name; nil before the first list
}

// list returns the nodes that count. When a new list fails, those of the last one count.
func (n *nodes) list(ctx context.Context) ([]string, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if now := time.Now(); !now.Before(n.next) {
		n.refresh(ctx, now)
	}
	if n.addrs == nil {
		return nil, n.failed
	}
	return n.names, nil
}

// refresh lists the Nodes, from the API server's memory and in its shortest form. Policies and
// addresses need more of a Node than its metadata.
func (n *nodes) refresh(ctx context.Context, now time.Time) {
	var all v1.NodeList
	n.failed = n.client.core.Get().Resource("nodes").VersionedParams(&metav1.ListOptions{ResourceVersion: "0"}, metav1.ParameterCodec).Do(ctx).Into(&all)
	if n.failed != nil {
		n.next = time.Now().Add(listRetry)
		return
	}
	n.names, n.addrs = nil, map[string]string{}
	n.next = time.Now().Add(refreshFor(len(all.Items))) // after a slow list, too, nobody lists for so long
	for i := range all.Items {
		node := &all.Items[i]
		if n.policy.Counts(node, now) {
			n.names = append(n.names, node.Name)
			n.addrs[node.Name] = address(node)
		}
	}
}

// address returns where a node can be dialled: its internal address before others, or nothing.
func address(node *v1.Node) (addr string) {
	for _, a := range node.Status.Addresses {
		if a.Type == v1.NodeInternalIP {
			return a.Address
		}
		if a.Type == v1.NodeExternalIP {
			addr = cmp.Or(addr, a.Address)
		}
	}
	return addr
}

func (n *nodes) address(node string) string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.addrs[node]
}

// Dial returns how to ask all nodes directly, at their internal addresses.
func (c *Client) Dial(o NodeOptions) programmed.Waiting {
	const port = 10256
	n := &nodes{client: c, policy: o.Policy}
	if o.Client == nil {
		o.Client = &http.Client{Transport: &http.Transport{IdleConnTimeout: time.Minute, MaxIdleConnsPerHost: 1}}
	}
	ask := programmed.OverHTTP(o.Client, func(node string) string {
		return "http://" + net.JoinHostPort(n.address(node), strconv.Itoa(int(cmp.Or(o.Port, port)))) + "/programmed"
	})
	return programmed.Waiting{Nodes: n.list, Ask: func(ctx context.Context, node string, c programmed.ServiceChange) (programmed.NodeReport, error) {
		if n.address(node) == "" {
			return programmed.NodeReport{}, errors.New("its Node has no address")
		}
		report, err := ask(ctx, node, c)
		if err == nil && report.Node != node {
			err = fmt.Errorf("node %q answers at its address %s", report.Node, n.address(node))
		}
		return report, err
	}}
}
