package cluster

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"go.uber.org/zap"
	coordination "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/internal/pause"
	"github.com/serviceplane/serviceplane/node/programmed"
)

// The objects of the way through the API server. All are Leases of one namespace.
const (
	// LeaseNamespace is the default namespace of the Leases. It has nothing else: the right to write
	// the Leases of nodes, whose names cannot be listed in a Role, is one for the whole namespace.
	LeaseNamespace = "serviceplane-programmed"
	// SwitchName is the Lease that waiters renew. The manifest of the proxy creates it.
	SwitchName = "serviceplane-programmed-waiting"
	// LeaseLabel is the label of the Leases of nodes; its value is "node".
	LeaseLabel = "serviceplane.io/programmed"
	// ReportAnnotation has the programmed.NodeReport of a node, as JSON.
	ReportAnnotation = "serviceplane.io/programmed-report"

	leasePrefix = "serviceplane-programmed-"
	// waitingFor is how long a renewal of the switch counts for a node, from when the node saw
	// it: clocks may differ. A waiter that died costs as long.
	waitingFor = 15 * time.Second
	// renewEvery is how often waiters renew the switch, all of them together: see renewPause.
	renewEvery = 5 * time.Second
	// mostWrites is how many Leases a second all nodes write together, about.
	mostWrites = 500
	// intervalAnnotation gives the switch the shortest pause between two writes of a node.
	intervalAnnotation = "serviceplane.io/programmed-interval"
	shortestInterval   = time.Second
	// longestInterval bounds what one waiter can do to others, who may write the switch too. It is that of
	// 15,000 nodes.
	longestInterval = 30 * time.Second
)

// PublishOptions say what a node publishes.
type PublishOptions struct {
	Node string
	// Proxy is a *proxier.Proxier. It is not asked while nobody waits.
	Proxy programmed.Proxy
	// Namespace is that of the Leases; empty means LeaseNamespace.
	Namespace string
	Logger    *zap.Logger
}

// Publish writes what a node has programmed to its Lease until ctx ends: only while somebody waits,
// only what is new, and at most once a second, or less often in a large cluster. Otherwise it only
// watches one object. First it clears the report of a process before it.
func (c *Client) Publish(ctx context.Context, o PublishOptions) error {
	o.Namespace = cmp.Or(o.Namespace, LeaseNamespace)
	o.Logger = cmp.Or(o.Logger, zap.NewNop())
	p := &publisher{client: c, options: o, wanted: make(chan time.Duration, 1)}
	p.save = p.put
	var writing sync.WaitGroup
	defer writing.Wait()
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	writing.Go(func() { p.clear(ctx); p.write(ctx) })
	from := c.leasesOf(o.Namespace, func(l *metav1.ListOptions) {
		l.FieldSelector = fields.OneTermEqualSelector(metav1.ObjectNameField, SwitchName).String()
	})
	var said sync.Once
	keepFollowing(ctx, from, events[*coordination.Lease]{
		set: p.renewed, deleted: func(*coordination.Lease) {},
		all: func(all []*coordination.Lease, _ string) {
			for _, l := range all {
				p.renewed(l)
			}
		},
	}, func(err error) {
		if refused(err) {
			said.Do(func() {
				o.Logger.Warn("nobody can wait for this node: its Leases cannot be watched", zap.String("namespace", o.Namespace), zap.Error(err))
			})
		}
	})
	return nil
}

// publisher writes the Lease of a node.
type publisher struct {
	client  *Client
	options PublishOptions
	// seen is the renewal that was seen last; the first one may be old, so that it does not count.
	seen   string
	wanted chan time.Duration // the interval, after each renewal
	save   func(ctx context.Context, text string) error
}

// renewed takes the switch. Only a renewal that the node sees happen counts.
func (p *publisher) renewed(l *coordination.Lease) {
	before := p.seen
	if p.seen = l.ResourceVersion; before == "" || before == p.seen {
		return
	}
	select {
	case <-p.wanted: // only the last one matters
	default:
	}
	p.wanted <- intervalOf(l)
}

// write writes while somebody waits.
func (p *publisher) write(ctx context.Context) {
	for {
		var interval time.Duration
		last := "" // the Lease may be gone since
		select {
		case interval = <-p.wanted:
		case <-ctx.Done():
			return
		}
		pause.For(ctx, time.Duration(rand.Int64N(int64(interval)))) // not all nodes at once
		until := time.Now().Add(max(waitingFor, 2*interval))
		for time.Now().Before(until) && ctx.Err() == nil {
			if text := p.report(); text != last {
				if err := p.save(ctx, text); err == nil {
					last = text
				} else if ctx.Err() == nil {
					p.options.Logger.Warn("Lease with what this node has programmed is not written, will be retried: waiters do not see it", zap.Error(err))
				}
			}
			pause.For(ctx, interval)
			select {
			case interval = <-p.wanted:
				until = time.Now().Add(max(waitingFor, 2*interval))
			default:
			}
		}
	}
}

// Bounds of what a Lease has.
const (
	mostListed  = 32 // failures, and as many endpoints that are not ready
	longestText = 120
)

// report returns the report of the node, without its time, so that only what is new is written.
func (p *publisher) report() string {
	report := programmed.NewReport(p.options.Node, p.options.Proxy, time.Time{})
	report.Limit(mostListed, longestText)
	text, err := json.Marshal(report)
	if err != nil { // strings and times only
		return ""
	}
	return string(text)
}

// clear removes the report of a process before, if there is one: after a boot of the machine, or
// with an older list of the API server, this process may not have what that one had.
func (p *publisher) clear(ctx context.Context) {
	for wait := time.Duration(0); ctx.Err() == nil; pause.For(ctx, wait) {
		err := p.patch(ctx, nil)
		if err == nil || apierrors.IsNotFound(err) { // usually there is no Lease
			return
		}
		wait = pauseAfter(err, wait)
	}
}

// patch changes the report in the Lease of the node; nil removes it.
func (p *publisher) patch(ctx context.Context, text *string) error {
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"annotations": map[string]*string{ReportAnnotation: text}},
		"spec":     map[string]any{"renewTime": metav1.NowMicro()},
	})
	if err != nil {
		return err
	}
	return p.client.leases.Patch(types.MergePatchType).Namespace(p.options.Namespace).Resource("leases").Name(leasePrefix + p.options.Node).Body(patch).Do(ctx).Error()
}

// put creates or changes the Lease of the node.
func (p *publisher) put(ctx context.Context, text string) error {
	if err := p.patch(ctx, &text); !apierrors.IsNotFound(err) {
		return err
	}
	name := leasePrefix + p.options.Node
	now := metav1.NowMicro()
	lease := &coordination.Lease{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: p.options.Namespace, Name: name, Labels: map[string]string{LeaseLabel: "node"},
			Annotations: map[string]string{ReportAnnotation: text}, OwnerReferences: p.owner(ctx),
		},
		Spec: coordination.LeaseSpec{HolderIdentity: &p.options.Node, RenewTime: &now},
	}
	return p.client.leases.Post().Namespace(p.options.Namespace).Resource("leases").Body(lease).Do(ctx).Error()
}

// onlyMetadata is the form of a list of which only the metadata is needed. A server that does not
// have it answers with the whole objects, whose metadata is the same.
const onlyMetadata = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json"

// owner is the Node, so that the Lease goes with it. It lists, which the proxy may do.
func (p *publisher) owner(ctx context.Context) []metav1.OwnerReference {
	var nodes metav1.PartialObjectMetadataList
	only := metav1.ListOptions{ResourceVersion: "0", FieldSelector: fields.OneTermEqualSelector(metav1.ObjectNameField, p.options.Node).String()}
	text, err := p.client.core.Get().Resource("nodes").VersionedParams(&only, metav1.ParameterCodec).SetHeader("Accept", onlyMetadata).Do(ctx).Raw()
	if err != nil || json.Unmarshal(text, &nodes) != nil || len(nodes.Items) == 0 {
		return nil // the Lease stays, which harms nobody
	}
	return []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: p.options.Node, UID: nodes.Items[0].UID}}
}

// LeaseOptions say for whom Leases are read.
type LeaseOptions struct {
	Policy programmed.NodePolicy
	// Namespace is that of the Leases; empty means LeaseNamespace.
	Namespace string
}

// Leased returns how to ask all nodes through the API server, for clusters where nodes cannot be
// dialled. It has the nodes write their Leases until stop is called, which waits for the end.
func (c *Client) Leased(ctx context.Context, o LeaseOptions) (w programmed.Waiting, stop func(), err error) {
	o.Namespace = cmp.Or(o.Namespace, LeaseNamespace)
	from := c.leasesOf(o.Namespace, func(l *metav1.ListOptions) { l.LabelSelector = LeaseLabel + "=node" })
	r := &reports{why: errors.New("it has written no Lease yet: does its proxy publish what it has programmed?")}
	n := &nodes{client: c, policy: o.Policy}
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	running.Go(func() { c.renew(ctx, o.Namespace, n, r) })
	running.Go(func() {
		to := events[*coordination.Lease]{
			set:     func(l *coordination.Lease) { r.change(func() { r.record(l) }) },
			deleted: func(l *coordination.Lease) { r.change(func() { delete(r.all, nodeOf(l)) }) },
			all:     func(all []*coordination.Lease, _ string) { r.change(func() { r.replace(all) }) },
		}
		keepFollowing(ctx, from, to, func(err error) {
			r.change(func() { r.watching = fmt.Errorf("watch Leases of namespace %s: %w", o.Namespace, err) })
		})
	})
	return programmed.Waiting{Nodes: n.list, Ask: r.ask}, func() { cancel(); running.Wait() }, nil
}

// renew renews the switch until ctx ends, unless another waiter did.
func (c *Client) renew(ctx context.Context, namespace string, n *nodes, r *reports) {
	for ctx.Err() == nil {
		interval, err := c.renewOnce(ctx, namespace, n)
		if err != nil {
			err = fmt.Errorf("renew Lease %s/%s, so that nodes write theirs: %w", namespace, SwitchName, err)
		}
		r.change(func() { r.renewing = err })
		pause.For(ctx, renewPause(interval))
	}
}

// renewPause is the pause between two renewals: all nodes watch each of them.
func renewPause(interval time.Duration) time.Duration { return max(renewEvery, interval/2) }

// renewOnce returns the interval that the nodes have now.
func (c *Client) renewOnce(ctx context.Context, namespace string, n *nodes) (interval time.Duration, err error) {
	var l coordination.Lease
	if err := c.leases.Get().Namespace(namespace).Resource("leases").Name(SwitchName).Do(ctx).Into(&l); err != nil {
		return 0, err
	}
	interval = intervalOf(&l)
	if l.Spec.RenewTime != nil {
		if age := time.Since(l.Spec.RenewTime.Time); age >= 0 && age < renewPause(interval)/2 {
			return interval, nil
		}
	}
	names, err := n.list(ctx)
	if err != nil {
		return interval, fmt.Errorf("list nodes: %w", err)
	}
	now := metav1.NowMicro()
	l.Spec.RenewTime, interval = &now, intervalFor(len(names))
	metav1.SetMetaDataAnnotation(&l.ObjectMeta, intervalAnnotation, interval.String())
	err = c.leases.Put().Namespace(namespace).Resource("leases").Name(SwitchName).Body(&l).Do(ctx).Error()
	if apierrors.IsConflict(err) { // another waiter was first
		return interval, nil
	}
	return interval, err
}

// intervalOf is the interval that the switch has.
func intervalOf(l *coordination.Lease) time.Duration {
	interval, err := time.ParseDuration(l.Annotations[intervalAnnotation])
	if err != nil {
		return shortestInterval
	}
	return min(max(interval, shortestInterval), longestInterval)
}

// intervalFor is the pause between two writes of each of so many nodes.
func intervalFor(nodes int) time.Duration {
	return max(shortestInterval, time.Duration(nodes)*time.Second/mostWrites)
}

// reports are those of the Leases.
type reports struct {
	mu  sync.Mutex // guards all below
	all map[string]programmed.NodeReport
	// Why a node may have none: this, if nothing has failed.
	why, watching, renewing error
}

// replace takes all Leases, under the lock.
func (r *reports) replace(all []*coordination.Lease) {
	r.watching = nil
	r.all = make(map[string]programmed.NodeReport, len(all))
	for _, l := range all {
		r.record(l)
	}
}

func (r *reports) change(f func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	f()
}

func nodeOf(l *coordination.Lease) string { return l.Name[min(len(leasePrefix), len(l.Name)):] }

// record reads a Lease, under the lock.
func (r *reports) record(l *coordination.Lease) {
	var report programmed.NodeReport
	if err := json.Unmarshal([]byte(l.Annotations[ReportAnnotation]), &report); err != nil || report.Node != nodeOf(l) {
		delete(r.all, nodeOf(l))
		return
	}
	r.all[report.Node] = report
}

// ask is an Ask of programmed.Waiting.
func (r *reports) ask(_ context.Context, node string, _ programmed.ServiceChange) (programmed.NodeReport, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	report, ok := r.all[node]
	if ok {
		return report, nil
	}
	return report, cmp.Or(errors.Join(r.watching, r.renewing), r.why)
}
