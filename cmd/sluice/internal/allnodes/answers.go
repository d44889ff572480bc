package allnodes

import (
	"cmp"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/sluice-proxy/sluice/cmd/sluice/internal/merge"
	"github.com/sluice-proxy/sluice/live/api"
)

// merged are the answers of all nodes together, by path.
var merged = map[string]func(f *API, w http.ResponseWriter, r *http.Request, query url.Values) error{
	api.PathStatus:      (*API).status,
	api.PathServices:    (*API).services,
	api.PathConnections: (*API).connections,
	api.PathFailures:    (*API).failures,
	api.PathComplete:    (*API).complete,
	api.PathRates:       (*API).rates,
	api.PathTap:         (*API).tap,
	api.PathPast:        (*API).past,
}

// status adds up what the nodes serve. It is ready if all of them are.
func (f *API) status(w http.ResponseWriter, r *http.Request, query url.Values) error {
	all, err := ask[api.Status](f, r, query, f.answering())
	if errors.Is(err, errNobody) {
		send(w, &api.Status{Version: api.Version{API: "v1", Node: "no node"}, Trouble: err.Error(), Nodes: f.Nodes()})
		return nil
	}
	if err != nil {
		return err
	}
	sum := all[0].answer
	var trouble []string
	sum.Ready, sum.Connections, sum.Sessions, sum.Limit, sum.Flows, sum.FlowsLimit = true, 0, 0, 0, 0, 0
	sum.Drained, sum.Problems, sum.ProblemsAll = nil, nil, 0
	for i := range all {
		a := &all[i].answer
		if !a.Ready {
			sum.Ready = false
			trouble = append(trouble, all[i].node+": "+cmp.Or(a.Trouble, "not in force"))
		}
		if a.Connected != nil && !*a.Connected {
			sum.Connected = a.Connected
		}
		if a.Applied.After(sum.Applied) {
			sum.Applied = a.Applied
		}
		sum.Connections += a.Connections
		sum.Sessions += a.Sessions
		sum.Limit += a.Limit
		sum.Flows += a.Flows
		sum.FlowsLimit += a.FlowsLimit
		sum.Drained = append(sum.Drained, a.Drained...)
		if a.ProblemsAll > sum.ProblemsAll { // each node has the same objects
			sum.Problems, sum.ProblemsAll = a.Problems, a.ProblemsAll
		}
	}
	sum.Nodes = f.Nodes()
	sum.Node, sum.Trouble = fmt.Sprintf("%d nodes", len(sum.Nodes)), strings.Join(trouble, "; ")
	send(w, &sum)
	return nil
}

// services are those that any node knows. What a node alone knows of an endpoint, such as
// that it is ejected, is the last one's that says so.
func (f *API) services(w http.ResponseWriter, r *http.Request, query url.Values) error {
	all, err := ask[api.Services](f, r, query, f.answering())
	if err != nil {
		return err
	}
	sum := &api.Services{Services: []api.Service{}}
	at := make(map[[2]string]int) // in sum.Services
	for i := range all {
		a := &all[i].answer
		sum.Matched, sum.Partial = max(sum.Matched, a.Matched), sum.Partial || a.Partial
		for j := range a.Services {
			s := &a.Services[j]
			k := [2]string{s.Service, s.Protocol}
			n, known := at[k]
			if !known {
				at[k] = len(sum.Services)
				sum.Services = append(sum.Services, *s)
				continue
			}
			addService(&sum.Services[n], s)
		}
	}
	sum.Matched = max(sum.Matched, len(sum.Services))
	slices.SortFunc(sum.Services, func(a, b api.Service) int {
		return cmp.Or(strings.Compare(a.Service, b.Service), strings.Compare(a.Protocol, b.Protocol))
	})
	send(w, sum)
	return nil
}

func addService(sum, s *api.Service) {
	sum.Held += s.Held
	sum.Queued += s.Queued
	sum.Totals.Opened += s.Totals.Opened
	sum.Totals.Open += s.Totals.Open
	sum.Totals.Retried += s.Totals.Retried
	for i := range s.Endpoints {
		e := &s.Endpoints[i]
		n := slices.IndexFunc(sum.Endpoints, func(o api.Endpoint) bool { return o.Endpoint == e.Endpoint })
		if n < 0 {
			sum.Endpoints = append(sum.Endpoints, *e)
			continue
		}
		o := &sum.Endpoints[n]
		open := o.Open + e.Open
		if e.Ejected != nil || e.Full {
			o.Standing = e.Standing
		}
		o.Open, o.Local = open, false // of several nodes
	}
}

// connections are sorted over all nodes.
func (f *API) connections(w http.ResponseWriter, r *http.Request, query url.Values) error {
	offset, limit := number(query, "offset", 0), number(query, "limit", api.DefaultRows)
	query.Del("offset")
	query.Set("limit", strconv.Itoa(min(offset+limit, api.MaxRows)))
	all, err := ask[api.Connections](f, r, query, f.answering())
	if err != nil {
		return err
	}
	rows, sum := merge.List[api.Connection]{Compare: merge.Connections(query.Get("sort")), Limit: offset + limit}, &api.Connections{}
	for i := range all {
		a := &all[i].answer
		sum.Open += a.Open
		sum.Matched += a.Matched
		for j := range a.Connections {
			a.Connections[j].ProxyNode = all[i].node
		}
		rows.Add(a.Connections)
	}
	sum.Connections = append([]api.Connection{}, rows.Rows[min(offset, len(rows.Rows)):]...)
	send(w, sum)
	return nil
}

func (f *API) failures(w http.ResponseWriter, r *http.Request, query url.Values) error {
	all, err := ask[api.Failures](f, r, query, f.answering())
	if err != nil {
		return err
	}
	rows := merge.List[api.Failure]{Compare: merge.Failures, Limit: number(query, "limit", api.DefaultRows), Rows: []api.Failure{}}
	for i := range all {
		for j := range all[i].answer.Failures {
			all[i].answer.Failures[j].ProxyNode = all[i].node
		}
		rows.Add(all[i].answer.Failures)
	}
	send(w, &api.Failures{Failures: rows.Rows})
	return nil
}

// complete is asked of one node: all have the same words.
func (f *API) complete(w http.ResponseWriter, r *http.Request, query url.Values) error {
	nodes := f.answering()
	all, err := ask[any](f, r, query, nodes[:min(1, len(nodes))])
	if err != nil {
		return err
	}
	send(w, all[0].answer)
	return nil
}

// number returns a parameter that the nodes have checked.
func number(query url.Values, name string, none int) int {
	if n, err := strconv.Atoi(query.Get(name)); err == nil && n >= 0 {
		return min(n, api.MaxRows)
	}
	return none
}
